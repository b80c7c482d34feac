// The table's filter: a row stays if it has every word and both choices. A link to a race opens what it is folded in.
(() => {
  const field = (id) => document.getElementById(id);
  const rows = [...document.querySelectorAll("#all tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  field("filter").addEventListener("input", () => {
    const words = field("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const impl = field("impl").value, outcome = field("outcome").value;
    rows.forEach((row, index) => {
      row.hidden = !(words.every((word) => texts[index].includes(word))
        && (!impl || row.dataset.impl === impl) && (!outcome || row.dataset.outcome === outcome));
    });
    field("count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  });
  field("filter").addEventListener("submit", (event) => event.preventDefault());
  const open = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (!target) return;
    const own = target.querySelector(":scope > details");
    if (own) own.open = true;
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  open();
})();
