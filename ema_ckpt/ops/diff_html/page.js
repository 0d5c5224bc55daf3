
const body = document.querySelector("#tensors tbody"), rows = [...body.rows];
const heads = [...document.querySelectorAll("#tensors thead th")];
const filter = document.querySelector("#filter"), count = document.querySelector("#count");
function key(row, column, kind) {
  const cell = row.cells[column];
  if (kind === "text") return cell.textContent;
  return cell.dataset.value === "" ? Infinity : Number(cell.dataset.value);
}
function sort(column, kind) {
  const head = heads[column], down = head.getAttribute("aria-sort") !== "descending" && kind !== "text"
    || head.getAttribute("aria-sort") === "ascending";
  heads.forEach(h => h.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const keyed = rows.map(row => [key(row, column, kind), row]);
  keyed.sort((p, q) => (p[0] < q[0] ? -1 : p[0] > q[0] ? 1 : 0) * (down ? -1 : 1));
  body.append(...keyed.map(pair => pair[1]));
}
function show() {
  const text = filter.value.toLowerCase();
  let shown = 0;
  for (const row of rows) { row.hidden = !row.cells[0].textContent.toLowerCase().includes(text); shown += !row.hidden; }
  count.textContent = shown + " of " + rows.length;
}
for (const button of document.querySelectorAll("#tensors button"))
  button.addEventListener("click", () => sort(Number(button.dataset.column), button.dataset.kind));
filter.addEventListener("input", show);
heads[1].setAttribute("aria-sort", "descending");
show();
