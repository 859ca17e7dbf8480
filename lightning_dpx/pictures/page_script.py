"""What a page does by itself: tables are sorted by a click on a head, pictures grow, the pointer names the step."""

SCRIPT = """
const units = {KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40};
function valueOf(row, column) {
  const text = row.children[column].textContent.trim();
  const found = text.replaceAll(",", "").match(/^(-?[\\d.]+(?:e[-+]?\\d+)?)\\s*(\\w*)/);
  return found ? Number(found[1]) * (units[found[2]] || 1) : text;
}
function compare(one, two) {
  if (typeof one !== typeof two) return typeof one === "number" ? 1 : -1;
  return one < two ? -1 : one > two ? 1 : 0;
}
for (const head of document.querySelectorAll("th")) {
  head.tabIndex = 0;
  const sort = () => {
    const heads = [...head.parentNode.children];
    const column = heads.indexOf(head);
    const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const rows = [...head.closest("table").querySelectorAll("tr")].filter((row) => row.querySelector("td"));
    rows.sort((one, two) => sign * compare(valueOf(one, column), valueOf(two, column)));
    for (const row of rows) row.parentNode.append(row);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
}
for (const figure of document.querySelectorAll(".figure")) {
  figure.addEventListener("click", () => figure.classList.toggle("large"));
}
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
for (const picture of document.querySelectorAll("svg[data-hover]")) {
  const hover = JSON.parse(picture.dataset.hover);
  picture.addEventListener("mousemove", (event) => {
    const box = picture.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const place = hover.first + (share - hover.left) / (hover.right - hover.left) * (hover.last - hover.first);
    const texts = hover.texts.filter((entry) => entry[0] <= place);
    const inside = share >= hover.left && share <= hover.right && texts.length > 0;
    tip.hidden = !inside;
    if (!inside) return;
    tip.textContent = texts[texts.length - 1][1];
    tip.style.left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 16 + "px";
  });
  picture.addEventListener("mouseleave", () => { tip.hidden = true; });
}
"""
