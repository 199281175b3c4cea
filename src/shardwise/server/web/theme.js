// Before the first paint: the theme that was chosen here, if one was.
"use strict";
{
  const chosen = localStorage.getItem("shardwise.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
