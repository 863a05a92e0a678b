"use strict";
// The list of nodes: rows are [stage, node, module, operator, outputs, compute]. Text is added as text content, never as markup.
const rows = JSON.parse(document.getElementById("nodes").textContent);
const searchTexts = rows.map((row) => row.join(" ").toLowerCase());
const tableBody = document.getElementById("node-rows");
const countLine = document.getElementById("node-count");
const moreButton = document.getElementById("node-more");
const searchField = document.getElementById("node-search");
const columnNames = [...document.querySelectorAll("#node-list th")].map((head) => head.textContent);
const ROWS_PER_STEP = 200;
let matches = [];
let shownCount = 0;

function showMore() {
  const fragment = document.createDocumentFragment();
  for (const row of matches.slice(shownCount, shownCount + ROWS_PER_STEP)) {
    const tableRow = document.createElement("tr");
    row.forEach((text, column) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      cell.dataset.label = columnNames[column];
      if (column < 2 || column === 5) cell.className = "number";
      tableRow.append(cell);
    });
    fragment.append(tableRow);
  }
  tableBody.append(fragment);
  shownCount = Math.min(shownCount + ROWS_PER_STEP, matches.length);
  moreButton.hidden = shownCount === matches.length;
  const suffix = moreButton.hidden ? "" : `, the first ${shownCount} shown`;
  countLine.textContent = `${matches.length} of ${rows.length} nodes${suffix}`;
}

function search() {
  const words = searchField.value.toLowerCase().split(/\s+/).filter(Boolean);
  matches = rows.filter((_, index) => words.every((word) => searchTexts[index].includes(word)));
  shownCount = 0;
  tableBody.replaceChildren();
  showMore();
}

searchField.addEventListener("input", search);
moreButton.addEventListener("click", showMore);
search();
