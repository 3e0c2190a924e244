"""The handlers of the routes, one module for each part of the API."""
