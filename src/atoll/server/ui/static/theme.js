// Sets the theme before the first paint: the one chosen in this browser, else the system's.
"use strict";
(() => {
  const saved = localStorage.getItem("atoll-theme");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = saved || (dark ? "dark" : "light");
})();
