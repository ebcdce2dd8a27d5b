"use strict";
(() => {
  const root = document.documentElement;
  root.dataset.script = "";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

  // ---- figures: Bokeh draws on a canvas, which no style sheet reaches ----------------------------

  function paint() {
    root.toggleAttribute("data-dark", isDark());
    if (typeof Bokeh === "undefined") return;
    const [ink, grid, blue] = isDark()
      ? ["#e4e7eb", "#36414d", "#56b4e9"]
      : ["#1f2933", "#e2e6ea", "#0072b2"];
    const recolour = (model, colour) =>
      model.setv(model.fill_color ? { line_color: colour, fill_color: colour } : { line_color: colour });
    for (const page of Bokeh.documents) {
      for (const model of page.all_models) {
        if (model.type.endsWith("Axis")) {
          model.setv({ axis_label_text_color: ink, major_label_text_color: ink });
        } else if (model.type === "Grid") {
          model.setv({ grid_line_color: model.grid_line_color === null ? null : grid });
        } else if (model.tags.includes("ink")) {
          recolour(model, ink);
        } else if (model.tags.includes("blue")) {
          recolour(model, blue);
        }
      }
    }
  }

  async function draw() {
    const plots = JSON.parse(document.getElementById("plots").textContent);
    if (plots !== null) {
      await Bokeh.embed.embed_items(plots.documents, plots.items);
    }
    paint();
    const wait = () => {
      if (plots === null || Bokeh.documents.every((page) => page.is_idle)) {
        root.dataset.ready = performance.now().toFixed(0); // milliseconds since the page was opened
      } else {
        requestAnimationFrame(wait);
      }
    };
    wait();
  }

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    paint();
  });
  dark.addEventListener("change", paint);

  // ---- the table ---------------------------------------------------------------------------------

  function prepare(table) {
    const body = table.tBodies[0];
    const count = document.getElementById("count");
    const rows = Array.from(body.rows, (row) => ({ row, text: row.textContent.toLowerCase() }));

    document.getElementById("filter").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const { row, text } of rows) {
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.value = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
    });

    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const isNumber = head.classList.contains("number");
        const before = head.getAttribute("aria-sort");
        const falls = before === null ? isNumber : before === "ascending"; // largest numbers first
        const key = isNumber
          ? ({ row }) => Number(row.cells[column].dataset.v)
          : ({ row }) => row.cells[column].textContent;
        const compare = isNumber ? (a, b) => a - b : new Intl.Collator("en", { numeric: true }).compare;
        const keyed = rows.map((each) => [key(each), each.row]);
        keyed.sort((a, b) => (falls ? -1 : 1) * compare(a[0], b[0]));
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", falls ? "descending" : "ascending");
        body.append(...keyed.map((each) => each[1]));
      });
    });
  }

  const table = document.getElementById("decisions");
  if (table !== null) prepare(table);
  draw();
})();
