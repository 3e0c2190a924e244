// Before the first paint, so that a dark room stays dark. Not a module: modules come after it.
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
