"use strict";
(() => {
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const valueOf = (row, index) => row.cells[index].dataset.v;

  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? collator.compare(a, b) : x - y;
  };

  const sortBy = (table, head, index) => {
    const up = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => {
      const x = valueOf(a, index), y = valueOf(b, index);
      if (x === "" || y === "") return (x === "") - (y === "");
      return up ? compare(y, x) : compare(x, y);
    });
    body.append(...rows);
  };

  const addSorting = (table) => {
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      const button = document.createElement("button");
      button.type = "button";
      const name = head.querySelector(".name");
      name.replaceWith(button);
      button.append(name);
      button.addEventListener("click", () => sortBy(table, head, index));
    });
  };

  const addFilter = (table) => {
    const tools = document.createElement("div");
    tools.className = "tools";
    const label = document.createElement("label");
    label.htmlFor = `${table.id}-filter`;
    const of = document.createElement("span");
    of.className = "quiet";
    of.textContent = ` of ${table.caption.textContent}`;
    label.append("Filter rows", of);
    const input = document.createElement("input");
    input.type = "search";
    input.id = label.htmlFor;
    input.autocomplete = "off";
    const shown = document.createElement("output");
    shown.htmlFor.add(input.id);
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        count += !row.hidden;
      }
      shown.textContent = words.length ? `${count} of ${table.tBodies[0].rows.length} rows` : "";
    };
    input.addEventListener("input", apply);
    tools.append(label, input, shown);
    table.closest(".table").prepend(tools);
  };

  for (const table of document.querySelectorAll("table")) {
    if (table.tBodies[0].rows.length > 1) addSorting(table);
    if (table.tBodies[0].rows.length > 8 && !table.closest(".fit")) addFilter(table);
  }

  for (const figure of document.querySelectorAll(".command")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const code = figure.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    figure.querySelector("figcaption").append(button);
  }

  // A copied number takes along the words that lower its claim, from wherever they stand.
  const partOf = (owner, range) => {
    const part = document.createRange();
    part.selectNodeContents(owner);
    if (range.compareBoundaryPoints(Range.START_TO_START, part) > 0) {
      part.setStart(range.startContainer, range.startOffset);
    }
    if (range.compareBoundaryPoints(Range.END_TO_END, part) < 0) {
      part.setEnd(range.endContainer, range.endOffset);
    }
    return String(part);
  };
  addEventListener("copy", (event) => {
    const selection = getSelection();
    if (!selection.rangeCount || selection.isCollapsed) return;
    const range = selection.getRangeAt(0);
    const missing = new Set();
    for (const owner of document.querySelectorAll("[data-care]")) {
      if (!range.intersectsNode(owner)) continue;
      const part = partOf(owner, range);
      if (!part.trim()) continue;
      for (const word of owner.dataset.care.split(", ")) {
        if (!part.includes(word)) missing.add(word);
      }
    }
    if (!missing.size) return;
    const text = String(selection).trimEnd();
    event.clipboardData.setData("text/plain", `${text} (${[...missing].join(", ")})`);
    event.preventDefault();
  });

  addEventListener("beforeprint", () => {
    for (const detail of document.querySelectorAll("details")) detail.open = true;
  });
})();
