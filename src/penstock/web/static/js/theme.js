// Sets the theme before the first paint, so that a dark page never flashes white. Not a module, because modules run later.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = localStorage.getItem("theme") || (system.matches ? "dark" : "light");
  };
  apply();
  system.addEventListener("change", apply);
})();
