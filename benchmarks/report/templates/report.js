// The table's filter: a row stays if it has every word and both choices. And a link to a race opens its details.
(() => {
  const field = (id) => document.getElementById(id);
  const rows = [...document.querySelectorAll("#all tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const words = field("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const impl = field("impl").value, outcome = field("outcome").value;
    let count = 0;
    rows.forEach((row, index) => {
      const stays = words.every((word) => texts[index].includes(word))
        && (!impl || row.dataset.impl === impl) && (!outcome || row.dataset.outcome === outcome);
      row.hidden = !stays;
      count += stays;
    });
    field("count").textContent = `${count} of ${rows.length} rows`;
  };
  field("filter").addEventListener("input", filter);
  field("filter").addEventListener("submit", (event) => event.preventDefault());
  const open = () => {
    const race = document.getElementById(location.hash.slice(1));
    const details = race && race.querySelector(":scope > details");
    if (details) details.open = true;
  };
  addEventListener("hashchange", open);
  open();
})();
