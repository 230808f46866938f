// Before the first paint: the theme that was chosen here, or else the system's.
"use strict";
(() => {
  const chosen = localStorage.getItem("atoll-theme");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen || (dark ? "dark" : "light");
})();
