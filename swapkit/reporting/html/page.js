// The content of the page, from the record in it.

root.dataset.script = "";
const record = JSON.parse(find("#record").textContent);
const { stats, pace, step } = record;
const FAR = 0.1; // share of a predicted time: a warning if the measured time differs by more
const MOST_SHOWN = 500; // rows of the table of decisions at once
const LONG = 6; // times the median: from there on, step times need a logarithmic axis
const MANY = 150; // points, which are drawn as a line only

const LAYERS = { // on the device, from the bottom to the top
  "other": GREY, "parameters and buffers": DEEP, "optimizer states": PURPLE, "gradients": GREEN,
  "inputs": YELLOW, "saved tensors": SKY, "temporary": ORANGE,
};
const LINES = {
  "without a plan": "dashes", "copies on the host": "dots", "copies on the disk": "dashdot",
};
const KINDS = {
  "forward": DEEP, "backward": SKY, "optimizer": GREEN, "recompute": ORANGE, "copy out": PURPLE,
  "copy in": GREY, "waiting for a copy": RED,
};
const LANES = ["compute", "recompute", "copy out", "copy in"];
const STAGES = { warmup: ["warm-up", YELLOW], search: ["search", ORANGE] };

// ---- texts for values ---------------------------------------------------------------------------

const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const SECONDS = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
const pickUnit = (units, most) => units.find(([, size]) => most >= 2 * size) ?? units.at(-1);

function bytes(value) {
  const [unit, size] = BYTES.find(([, each]) => value >= each) ?? BYTES.at(-1);
  return `${(value / size).toFixed(size === 1 ? 0 : 2)} ${unit}`;
}

function seconds(value) {
  if (value === 0) return "0 s";
  const [unit, size] = SECONDS.find(([, each]) => Math.abs(value) >= each) ?? SECONDS.at(-1);
  return `${(value / size).toFixed({ s: 3, ms: 2, us: 1 }[unit])} ${unit}`;
}

const percent = (share) => `${share < 0 ? "" : "+"}${(100 * share).toFixed(1)}%`;
const count = (value) => value.toLocaleString("en");
const sum = (values) => values.reduce((total, each) => total + each, 0);
const most = (values) => values.reduce((high, each) => Math.max(high, each), 0);
const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
const asRows = ({ fields, rows }) =>
  rows.map((row) => Object.fromEntries(fields.map((field, at) => [field, row[at]])));

// ---- the head: what was measured comes first ----------------------------------------------------

function fillSummary(steps) {
  const { step_seconds: measured, predicted_step_seconds: predicted } = stats;
  const isFar = measured && predicted && Math.abs(measured / predicted - 1) > FAR;
  const error = predicted
    ? `, ${percent(measured / predicted - 1)} from the prediction of ${seconds(predicted)}` : "";
  find("#measured").className = isFar ? "warning" : "lead";
  find("#measured").textContent = measured === null
    ? "" : `Measured: ${seconds(measured)} a step${error}` +
      (isFar ? ": times below that are predicted are as far off." : ".");
  const settled = record.stage === "stable" ? "The plan" : "The plan tried last";
  find("#plan-line").textContent = record.plan_text
    ? `${settled}: ${record.plan_text}.` : `There is no plan: ${record.why_no_plan}.`;
  const peak = `peak ${bytes(stats.peak_bytes)} of ${bytes(stats.budget_bytes)}`;
  find(".bar").setAttribute("aria-label", peak);
  find(".bar div").style.width = `${Math.min(100, 100 * stats.peak_bytes / stats.budget_bytes)}%`;
  for (const [name, value, more] of listFacts(steps)) {
    const fact = add(find(".facts"), "div");
    add(fact, "dt", name);
    const told = add(fact, "dd");
    add(told, "b", value);
    add(told, "span", more);
  }
  const device = record.hardware ? `${record.device} (${record.hardware})` : record.device;
  find(".made").textContent = `${device}, torch ${record.torch_version}, ` +
    `swapkit ${record.swapkit_version}, ${record.created}`;
}

function listFacts(steps) {
  const stages = { warmup: "in its warm-up", search: "trying plans", stable: "settled" };
  const stage = `the session is ${stages[record.stage] ?? record.stage}`;
  const share = (100 * stats.peak_bytes) / stats.budget_bytes;
  const { step_seconds: measured, unlimited_step_seconds: free, disk_peak_bytes: disk } = stats;
  const times = steps.map((each) => each.seconds);
  const time = measured ?? (times.length ? median(times) : null);
  const more = free === null ? "" : `; ${seconds(free)} predicted without a budget`;
  return [
    ["step time", time === null ? "-" : seconds(time), `median${more}`],
    ["peak", bytes(stats.peak_bytes), `reserved, ${share.toFixed(1)}% of the budget`],
    ["budget", bytes(stats.budget_bytes), `policy ${record.policy}`],
    ["steps", count(stats.steps), record.is_ended ? "ended" : stage],
    ["copied out", bytes(stats.swapped_out_bytes),
      `${bytes(stats.swapped_in_bytes)} back, in all steps`],
    ["waiting for copies", seconds(stats.stall_seconds),
      `${count(stats.oom_rescues)} rescues, ${count(stats.recomputed_regions)} recomputations`],
    ["on the host", bytes(stats.host_peak_bytes),
      `most copies at once${disk ? `; disk ${bytes(disk)}` : ""}`],
  ];
}

// ---- one step -----------------------------------------------------------------------------------

function drawStep() {
  const why = step.why_not_planned;
  const shown = step.times.length;
  find("#step .intro").textContent = (why
    ? `The recorded step without a plan, because ${why}.`
    : `One step as the simulator predicts it for the plan: ${count(step.operators)} recorded ` +
      "operators, with times scaled to the measured steps.") +
    (shown < step.instants
      ? ` Memory changes at ${count(step.instants)} instants; the figure shows ${count(shown)}, ` +
        "for each span of time the one with the most memory in use." : "");
  const end = pace * step.end;
  const [unit, size] = pickUnit(SECONDS, end);
  const time = makeAxis(0, end, `time in the step (${unit})`, size);
  drawMemory(time);
  drawLanes(time);
  for (const [name, nbytes, storages] of step.peak) {
    const row = add(find("#peak tbody"), "tr");
    add(row, "th", name, { scope: "row" });
    add(row, "td", bytes(nbytes), { class: "number" });
    add(row, "td", count(storages), { class: "number" });
  }
}

function drawMemory(time) {
  const { layers } = step;
  const times = step.times.map((each) => pace * each);
  const areas = Object.keys(LAYERS).filter((name) => name in layers);
  const lines = Object.keys(LINES).filter((name) => name in layers)
    .filter((name) => name !== "without a plan" || !step.why_not_planned);
  const tops = [times.map(() => 0)]; // of the areas, one above the other
  for (const name of areas) tops.push(tops.at(-1).map((below, at) => below + layers[name][at]));
  const inUse = tops.at(-1);
  const highest = most([stats.budget_bytes, most(inUse), ...Object.values(layers).map(most)]);
  const [unit, size] = pickUnit(BYTES, highest);
  const tellMost = (name) => `${name}, at most ${bytes(most(layers[name]))}`;
  new Chart("memory", 380, {
    x: time,
    y: makeAxis(0, 1.06 * highest, `memory (${unit})`, size),
    keys: [
      ...areas.map((name) => ["box", LAYERS[name], tellMost(name)]).reverse(),
      ["dashes", RED, `budget ${bytes(stats.budget_bytes)}`],
      ...lines.map((name) => [LINES[name], "ink", tellMost(name)]),
    ],
    draw(chart) {
      const stairs = (row) => asStairs(times, row, time.high);
      areas.forEach((name, at) =>
        chart.fill([...stairs(tops[at + 1]), ...stairs(tops[at]).reverse()], LAYERS[name]));
      lines.forEach((name) => chart.line(stairs(layers[name]), "ink", LINES[name]));
      chart.level(stats.budget_bytes);
    },
    tell(x) {
      const at = Math.max(0, times.findLastIndex((each) => each <= x));
      const names = [...areas.toReversed(), ...lines];
      return [`at ${seconds(x)}`, `in use: ${bytes(inUse[at])}`,
        ...names.map((name) => `${name}: ${bytes(layers[name][at])}`)];
    },
  });
}

function drawLanes(time) {
  const { texts } = step;
  const works = step.works.map(([kind, start, end, what, where, nbytes]) => ({
    kind: texts[kind], start: pace * start, end: pace * end, what: texts[what],
    where: texts[where], nbytes, lane: Math.max(0, LANES.indexOf(texts[kind])),
  }));
  const parts = listParts(works);
  const spent = {};
  for (const { kind, start, end } of works) spent[kind] = (spent[kind] ?? 0) + end - start;
  new Chart("lanes", 200, {
    x: time,
    y: makeAxis(4, 0, "", 1, { names: LANES }),
    keys: Object.keys(KINDS).filter((kind) => kind in spent)
      .map((kind) => ["box", KINDS[kind], `${kind}, ${seconds(spent[kind])}`]),
    draw(chart) {
      for (const { kind, start, end, lane } of works) {
        if (end < time.from || start > time.to) continue;
        chart.box(start, end, lane + 0.14, lane + 0.86, KINDS[kind] ?? GREY);
      }
      for (const { name, start, end, kind } of parts) { // as much of the name as fits
        const left = chart.px(Math.max(start, time.from));
        const right = chart.px(Math.min(end, time.to));
        const shown = name.split(".").map((_, at, all) => all.slice(at).join("."))
          .find((each) => chart.pen.measureText(each).width + 6 < right - left) ?? "";
        chart.pen.fillStyle = kind === "backward" ? "#14191f" : "#ffffff";
        chart.pen.fillText(shown, (left + right) / 2, chart.py(0.5));
      }
    },
    tell(x, y) {
      const near = (2 * (time.to - time.from)) / this.width;
      const work = works.find(({ start, end, lane }) =>
        lane === Math.floor(y) && start - near <= x && x <= end + near);
      if (work === undefined) return null;
      return [work.what, work.where + (work.nbytes ? `, ${bytes(work.nbytes)}` : ""),
        `at ${seconds(work.start)}, takes ${seconds(work.end - work.start)}`];
    },
  });
}

// Neighbouring operators of one part of the model: alike blocks differ in their first number. What
// is in no module belongs to the part before it.
function listParts(works) {
  const parts = [];
  for (const { kind, start, end, what, where, lane } of works) {
    if (lane !== 0 || what === kind) continue; // also a wait does not divide a part
    const names = where.startsWith("(") ? [] : where.split(".");
    const name = names.slice(0, names.findIndex((each) => /^\d+$/.test(each)) + 1 || 1).join(".");
    const last = parts.at(-1);
    if (last?.kind === kind && (name === "" || name === last.name)) last.end = end;
    else parts.push({ name, start, end, kind });
  }
  return parts;
}

// ---- the decisions ------------------------------------------------------------------------------

const COLUMNS = [ // heading, meaning, and how numbers are shown
  ["place", "the module that saved the storage first, and its number there"],
  ["made by", "the operator that makes it"],
  ["decision", "what happens to it between forward and backward"],
  ["size", "bytes on the device", bytes],
  ["costs", "time that the step waits for its copies, or recomputes it", seconds],
  ["copies", "time on the links, out and back", seconds],
  ["recomputing", "time that recomputing it takes, or would take", seconds],
  ["why", "the reason for the decision"],
];

function fillDecisions() {
  const rows = step.decisions.map((row) => {
    const cells = row.map((value, at) => {
      const show = COLUMNS[at][2];
      if (!show) return step.texts[value];
      return show === seconds && value !== null ? pace * value : value;
    });
    const words = cells.filter((each) => typeof each === "string");
    return { cells, text: words.join(" ").toLowerCase() };
  });
  for (const action of new Set(rows.map(({ cells }) => cells[2]))) {
    const members = rows.map(({ cells }) => cells).filter((cells) => cells[2] === action);
    const [nbytes, costs] = [3, 4].map((at) => sum(members.map((cells) => cells[at])));
    add(find(".totals"), "li", `${action}: ${count(members.length)} storages, ${bytes(nbytes)}` +
      (costs ? `, costs ${seconds(costs)}` : ""));
  }
  find("#numbers").textContent =
    `Autograd saves ${count(step.saved)} storages in this step, the total in the plan's line. ` +
    `A plan can move ${count(rows.length - step.states)} of them, which have a row; the others ` +
    "stay on the device. " +
    (step.states ? `${count(step.states)} more rows are states of the optimizer. ` : "") +
    "What is copied out in the head is the sum of all steps, those before the plan included.";
  sortAndSearch(rows);
}

function sortAndSearch(rows) {
  const head = find("#decisions thead tr"), search = find("#filter");
  const fill = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(({ text }) => words.every((word) => text.includes(word)));
    find("#decisions tbody").replaceChildren(...found.slice(0, MOST_SHOWN).map(makeRow));
    const some = found.length < rows.length ? `${count(found.length)} of ` : "";
    const left = found.length > MOST_SHOWN ? `, the first ${MOST_SHOWN} are shown` : "";
    find("#count").value = `${some}${count(rows.length)} rows${left}`;
  };
  COLUMNS.forEach(([name, meaning, isNumber], at) => {
    const kind = isNumber ? "number" : "text";
    const cell = add(head, "th", "", { scope: "col", class: kind, title: meaning });
    add(cell, "button", name, { type: "button" }).addEventListener("click", () => {
      const before = cell.getAttribute("aria-sort");
      const falls = before === null ? Boolean(isNumber) : before === "ascending";
      const compare = isNumber
        ? (a, b) => (a ?? -1) - (b ?? -1) : new Intl.Collator("en", { numeric: true }).compare;
      rows.sort((a, b) => (falls ? -1 : 1) * compare(a.cells[at], b.cells[at]));
      for (const each of head.children) each.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", falls ? "descending" : "ascending");
      fill();
    });
  });
  search.addEventListener("input", fill);
  fill();
}

function makeRow({ cells }) {
  const row = document.createElement("tr");
  cells.forEach((value, at) => {
    const [name, , show] = COLUMNS[at];
    if (show) {
      const text = value === null || (show === seconds && value === 0) ? "-" : show(value);
      add(row, "td", text, { class: "number", "data-v": value ?? -1 });
    } else if (name === "decision") {
      add(add(row, "td"), "span", value, { class: `tag ${value.split(" ")[0]}` });
    } else if (name === "place") {
      add(row, "th", value, { scope: "row" });
    } else {
      add(row, "td", value, { class: name.replace(" ", "-") });
    }
  });
  return row;
}

// ---- other budgets, and all steps ---------------------------------------------------------------

function drawBudgets() {
  const offers = asRows(record.trade_offs).map((each) => ({
    ...each, seconds: pace * each.seconds, bound_seconds: pace * each.bound_seconds,
  }));
  const marks = [
    ["diamond", ORANGE, "this plan, predicted", stats.predicted_step_seconds],
    ["cross", "ink", "this plan, measured", stats.step_seconds],
  ].filter(([, , , value]) => value);
  const budgets = offers.map((each) => each.budget_bytes);
  const low = Math.min(record.plan_bytes, ...budgets);
  const high = Math.max(record.plan_bytes, ...budgets);
  const room = 0.04 * (high - low) || 0.1 * high;
  const times = offers.map((each) => each.seconds);
  const highest = 1.1 * most([...times, ...marks.map(([, , , value]) => value)]);
  const [unit, size] = pickUnit(BYTES, high);
  const [timeUnit, timeSize] = pickUnit(SECONDS, highest);
  new Chart("budgets", 340, {
    x: makeAxis(low - room, high + room, `budget (${unit})`, size),
    y: makeAxis(0, highest, `step time (${timeUnit})`, timeSize),
    keys: [
      ["line", "blue", "fastest plan found (predicted)"],
      ["dots", GREY, "no plan is faster (lower bound)"],
      ...marks.map(([mark, colour, text, value]) => [mark, colour, `${text}: ${seconds(value)}`]),
    ],
    draw(chart) {
      chart.line(asStairs(budgets, times, high + room), "blue", "line", 2);
      chart.line(offers.map((each) => [each.budget_bytes, each.bound_seconds]), GREY, "dots", 2);
      chart.dots(offers.map((each) => [each.budget_bytes, each.seconds]), "blue", 4.5);
      for (const [mark, colour, , value] of marks) {
        const [right, up] = [8, 8].map((each, at) => at
          ? chart.yAt(0) - chart.yAt(each) : chart.xAt(each) - chart.xAt(0));
        const around = [[-right, 0], [0, up], [right, 0], [0, -up]]
          .map(([x, y]) => [record.plan_bytes + x, value + y]);
        if (mark === "diamond") chart.fill(around, colour);
        else [0, 1].forEach((at) => chart.line([around[at], around[at + 2]], colour, "line", 3));
      }
    },
    tell(x) {
      const gap = (each) => Math.abs(each.budget_bytes - x);
      const best = offers.reduce((a, b) => (gap(b) < gap(a) ? b : a));
      return [`budget: ${bytes(best.budget_bytes)}`, `step: ${seconds(best.seconds)}`,
        `no plan is below ${seconds(best.bound_seconds)}`, `swapped: ${bytes(best.swapped_bytes)}`,
        `recomputed: ${seconds(pace * best.recompute_seconds)}`];
    },
  });
}

function drawRun(steps) {
  const first = steps[0].step;
  const x = makeAxis(first - 0.5, steps.at(-1).step + 0.5, "step");
  const early = steps.filter(({ stage }) => stage in STAGES); // before the plan settled
  const shades = [...new Set(early.map(({ stage }) => stage))]
    .map((stage) => ["shade", STAGES[stage][1], STAGES[stage][0]]);
  find("#run .intro").textContent = stats.steps > steps.length
    ? `The session keeps its latest ${count(steps.length)} steps.` : "";

  const drawSteps = (name, height, { field, y, keys, tell, draw }) => new Chart(name, height, {
    x,
    y,
    keys: [...keys, ...shades],
    draw(chart) {
      chart.pen.globalAlpha = 0.22;
      for (const { step: at, stage } of early) {
        chart.box(at - 0.5, at + 0.5, y.to, y.from, STAGES[stage][1]);
      }
      chart.pen.globalAlpha = 1;
      draw(chart, steps.map((each) => [each.step, each[field]]));
    },
    tell(at) {
      const each = steps[Math.min(Math.max(Math.round(at) - first, 0), steps.length - 1)];
      return [`step ${each.step}, ${each.stage}`, tell(each)];
    },
  });
  const drawLine = (chart, points, colour) => {
    chart.line(points, colour);
    if (points.length <= MANY) chart.dots(points, colour, 3);
  };
  drawTimes(steps, drawSteps, drawLine);

  const peak = most(steps.map((each) => each.peak_bytes));
  const highest = Math.max(stats.budget_bytes, peak);
  const [unit, size] = pickUnit(BYTES, highest);
  drawSteps("peaks", 220, {
    field: "peak_bytes",
    y: makeAxis(0, 1.1 * highest, `peak (${unit})`, size),
    keys: [["line", GREEN, `peak reserved, at most ${bytes(peak)}`],
      ["dashes", RED, `budget ${bytes(stats.budget_bytes)}`]],
    tell: (each) => `peak ${bytes(each.peak_bytes)}, copied out ${bytes(each.swapped_out_bytes)}`,
    draw(chart, points) {
      drawLine(chart, points, GREEN);
      chart.level(stats.budget_bytes);
    },
  });

  const rescues = steps.map((each) => each.rescues);
  drawSteps("rescues", 220, {
    field: "rescues",
    y: makeAxis(0, 1.1 * most([4, ...rescues]), "rescues"),
    keys: [["box", PURPLE, `rescues, ${count(sum(rescues))} in these steps`]],
    tell: (each) => `${count(each.rescues)} rescues`,
    draw(chart, points) {
      for (const [at, rescued] of points) chart.box(at - 0.4, at + 0.4, rescued, 0, PURPLE);
    },
  });
}

function drawTimes(steps, drawSteps, drawLine) {
  const times = steps.map((each) => each.seconds);
  const [middle, longest, last] = [median(times), most(times), times.at(-1)];
  const shortest = times.reduce((low, each) => Math.min(low, each));
  const isLog = longest > LONG * middle && shortest > 0;
  const [unit, size] = pickUnit(SECONDS, middle);
  const [low, high] = isLog ? [0.8 * shortest, 1.25 * longest] : [0, 1.1 * longest || 1];
  const label = `time (${unit}${isLog ? ", logarithmic" : ""})`;
  drawSteps("times", 240, {
    field: "seconds",
    y: makeAxis(low, high, label, size, { isLog }),
    keys: [["line", "blue", `step time, median ${seconds(middle)}, last ${seconds(last)}`]],
    tell: (each) => seconds(each.seconds),
    draw: (chart, points) => drawLine(chart, points, "blue"),
  });
}

// ---- the whole page -----------------------------------------------------------------------------

// Fills a section, or says in it why there is nothing to show.
function fill(id, why, show) {
  if (!why) {
    show();
    return;
  }
  const section = find(`#${id}`);
  [...section.children].slice(1).forEach((each) => each.remove());
  add(section, "p", `${section.dataset.missing} is missing: ${why}.`, { class: "missing" });
}

const steps = asRows(record.steps);
const whyNoStep = step === null ? record.why_no_plan : "";
const noOffers = record.trade_offs.rows.length ? "" : "the speed of the links is unknown";
fillSummary(steps);
fill("step", whyNoStep, drawStep);
fill("plan", whyNoStep || step.why_not_planned, fillDecisions);
fill("budgets", record.plan_bytes === null ? record.why_no_plan : noOffers, drawBudgets);
fill("run", steps.length ? "" : "no step has ended", () => drawRun(steps));
if (!record.notes.length) find("#notes").remove();
for (const note of record.notes) {
  add(find("#notes ul"), "li", note.slice(0, 1).toUpperCase() + note.slice(1));
}

const redrawAll = () => charts.forEach((each) => each.redraw());
find("#theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  redrawAll();
});
dark.addEventListener("change", redrawAll);
printed.addEventListener("change", redrawAll);
redrawAll();
root.dataset.ready = performance.now().toFixed(0); // milliseconds since the page was opened
