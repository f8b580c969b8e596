for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    head.firstElementChild.onclick = () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const compare = (one, other) => {
        if (key(one) === "" || key(other) === "") return (key(one) === "") - (key(other) === "");
        const both = key(one) - key(other);
        return (up ? 1 : -1) * (Number.isNaN(both) ? key(one).localeCompare(key(other)) : both);
      };
      body.append(...[...body.rows].sort(compare));
    };
  });
}
