"use strict";
// The list of nodes: rows are [stage, node, module, operator, makes, compute]. Text goes in as text alone, never as markup.
const rows = JSON.parse(document.getElementById("nodes").textContent);
const found = rows.map((row) => row.join(" ").toLowerCase());
const body = document.getElementById("node-rows");
const count = document.getElementById("node-count");
const more = document.getElementById("node-more");
const search = document.getElementById("node-search");
const STEP = 200;
let matches = [];
let shown = 0;

function show() {
  const part = document.createDocumentFragment();
  for (const row of matches.slice(shown, shown + STEP)) {
    const line = document.createElement("tr");
    row.forEach((cell, column) => {
      const box = document.createElement("td");
      box.textContent = cell;
      if (column < 2 || column === 5) box.className = "number";
      line.append(box);
    });
    part.append(line);
  }
  body.append(part);
  shown = Math.min(shown + STEP, matches.length);
  more.hidden = shown === matches.length;
  count.textContent = `${matches.length} of ${rows.length} nodes` + (more.hidden ? "" : `, the first ${shown} shown`);
}

function look() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  matches = rows.filter((_, index) => words.every((word) => found[index].includes(word)));
  shown = 0;
  body.replaceChildren();
  show();
}

search.addEventListener("input", look);
more.addEventListener("click", show);
look();
