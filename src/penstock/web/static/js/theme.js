// Before the first paint, so that a dark room stays dark. Not a module: modules come after it.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = localStorage.getItem("theme") || (system.matches ? "dark" : "light");
  };
  apply();
  system.addEventListener("change", apply);
})();
