// The page around the chart: the summary, the lists, the table, and the controls.

const ROWS = 100;
let shownRows = ROWS;

function swatch(name) { return make("span", { class: "swatch", style: "background:var(--" + name + ")" }); }

function sentence() {
  const first = content.timelines[0], predicted = content.timelines.find(timeline => timeline.name !== "measured");
  const out = content.moved.reduce((sum, kind) => sum + kind.bytes_out, 0);
  const back = content.moved.reduce((sum, kind) => sum + kind.bytes_in, 0);
  const parts = [make("b", {}, seconds(first.seconds)), " a step"];
  if (first.name !== "measured") parts.push(" (" + first.name + ")");
  else if (predicted) parts.push(" (predicted: " + seconds(predicted.seconds) + ")");
  parts.push(" within ", make("b", {}, bytes(content.budget)));
  const insight = content.insight;
  if (insight && insight.in_core > content.budget) {
    parts.push("; without copies it takes ", make("b", {}, bytes(insight.in_core)));
  }
  parts.push(". Ops take ", make("b", {}, share(first.spent.ops, first.seconds)), " of the time. ");
  parts.push(out + back ? "Each step evicts " + bytes(out) + " and fetches " + bytes(back) + "." :
    "All tensors stay resident.");
  return parts;
}

function fillSpent() {
  byId("verdict").textContent = content.insight ? content.insight.verdict : "";
  const maxSeconds = Math.max(...content.timelines.map(timeline => timeline.seconds));
  const rows = content.timelines.map(timeline => {
    const strip = make("div", { class: "strip", style: "width:" + 100 * timeline.seconds / maxSeconds + "%" });
    for (const [part, name, text] of SPENT) {
      const value = timeline.spent[part];
      const title = text + ": " + seconds(value) + ", " + share(value, timeline.seconds);
      if (value > 0) strip.append(make("span", { title, style: "flex:" + 100 * value / timeline.seconds + " 0 0;background:var(--" + name + ")" }));
    }
    return make("div", { class: "spent" }, make("span", {}, timeline.name), make("div", { class: "track" }, strip),
      make("b", { class: "number" }, seconds(timeline.seconds)));
  });
  const first = content.timelines[0];
  const legend = make("ul", { class: "legend" });
  for (const [part, name, text] of SPENT) {
    const value = first.spent[part];
    if (value > 5e-7) legend.append(make("li", {}, swatch(name), text + " " + seconds(value)));
  }
  byId("spent").append(...rows, legend);
}

function fillWhich() {
  content.timelines.forEach((timeline, number) => {
    const press = () => {
      state.timeline = number;
      state.cursor = state.wait = null;
      byId("which").querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", i === number));
      fillWaits();
      redraw();
    };
    byId("which").append(make("button", { type: "button", "aria-pressed": number === 0, onclick: press },
      timeline.name));
  });
}

function fillLegend() {
  const kinds = KINDS.filter(kind => content.timelines.some(timeline => timeline.memory.held[kind]));
  for (const kind of kinds) byId("legend").append(make("li", {}, swatch(kind.replace(" ", "-")), kind));
  const dash = (name, text) =>
    make("li", {}, make("span", { class: "line", style: "border-color:var(--" + name + ")" }), text);
  byId("legend").append(dash("budget", "budget"));
  if (content.timelines.length > 1) byId("legend").append(dash("mark", "memory in the other timeline"));
  byId("legend").append(make("li", {}, swatch("wait"), "ops wait"));
  if (content.recomputed) byId("legend").append(make("li", {}, swatch("again"), "recomputed ops"));
  if (content.instructions.some(instruction => instruction[2] === 2)) {
    byId("legend").append(make("li", {}, swatch("on-demand"), "ops without a plan"));
  }
}

function fillWaits() {
  const { waits, more_waits: more } = now(), list = byId("waits");
  list.replaceChildren();
  const total = waits.reduce((sum, wait) => sum + wait.length, 0);
  byId("waits-note").textContent = waits.length
    ? "Ops waited for " + micro(total) + " in " + waits.length + (waits.length === 1 ? " wait" : " waits") +
      (more ? " (" + more + " shorter waits are not listed)" : "") + ". Choose one to see it in the chart."
    : "Ops never wait: every copy is complete in time.";
  const byLength = waits.map((wait, number) => [wait, number]).sort((a, b) => b[0].length - a[0].length);
  for (const [wait, number] of byLength) {
    const press = () => {
      state.wait = number;
      showWait(wait);
      chart.scrollIntoView({ block: "nearest" });
      const cause = content.instructions[wait.cause];
      if (cause[0] > 0 && storageById.has(cause[1])) select(cause[1], false);
    };
    list.append(make("li", {}, make("button", { type: "button", onclick: press },
      make("span", { class: "long" }, micro(wait.length)),
      make("span", { class: "what" }, (wait.who ? wait.who + " " : "") + wait.text, make("small", {}, wait.why)))));
  }
}

function fillCurve() {
  const insight = content.insight;
  const points = insight ? insight.points.filter(point => point.seconds !== null) : [];
  if (points.length < 2) return byId("curve-section").remove();
  drawCurves(byId("curve"), [{ points: points.map(point => [point.budget, point.seconds, point.policy]) }],
    insight.compute, content.budget);
  byId("curve-note").textContent = "Predicted. The red dot is this plan; the smallest budget is " +
    bytes(insight.smallest) + ", and from " + bytes(insight.in_core) + " on all tensors stay resident.";
  return undefined;
}

function fillHelps() {
  const helps = content.insight ? content.insight.helps : [];
  if (!helps.length) return byId("helps-section").remove();
  const maxSaving = Math.max(...helps.map(help => help.saves), 1e-9), total = content.timelines.at(-1).seconds;
  for (const help of helps) {
    byId("helps").append(make("li", {}, help.what + " saves ", make("b", {}, seconds(help.saves)),
      " a step (" + share(help.saves, total) + ")",
      make("div", { class: "gauge", style: "width:" + 100 * help.saves / maxSaving + "%" })));
  }
  return undefined;
}

function filtered() {
  const find = byId("find").value.trim().toLowerCase(), kind = byId("kind").value, fate = byId("fate").value;
  return content.storages.filter(storage => (!kind || storage.kind === kind) && (!fate || storage.fate === fate) &&
    (!find || (storage.name + " " + storage.module + " " + storage.source).toLowerCase().includes(find)));
}

function fillRows() {
  const shown = filtered(), total = shown.reduce((sum, storage) => sum + storage.bytes, 0);
  byId("count").textContent = shown.length + " of " + content.storages.length + " storages, " + bytes(total) +
    "; the largest first. Storages below 64 KiB always stay resident and are not listed.";
  byId("rows").replaceChildren(...shown.slice(0, shownRows).map(storage =>
    make("tr", { "data-storage": storage.id, "aria-selected": storage.id === state.selected,
      onclick: () => select(storage.id, false) },
      make("td", {}, make("button", { type: "button" }, storage.name)),
      make("td", {}, swatch(storage.kind.replace(" ", "-")), storage.kind),
      make("td", { class: "number" }, bytes(storage.bytes)), make("td", {}, storage.fate))));
  byId("more").hidden = shown.length <= shownRows;
}

function gapText([residency, start, end, next]) {
  const after = start < 0 ? "before the step" : "after " + opText(start) + timeText(start, true);
  const until = (next ? "in the next step before " : "before ") + opText(end) + timeText(end, false);
  if (residency !== "offload") return "is released " + after + ", and recomputed " + until;
  return start < 0 ? "is fetched " + until : "is evicted " + after + ", and fetched " + until;
}

function timeText(op, ends) {
  const index = runOf.get(op);
  return index === undefined ? "" : " (" + micro((ends ? now().ends : now().starts)[index]) + ")";
}

function select(id, scroll = true) {
  state.selected = id;
  const storage = storageById.get(id);
  document.querySelectorAll("#rows tr").forEach(row =>
    row.setAttribute("aria-selected", row.dataset.storage === String(id)));
  const facts = make("dl", { class: "notes" });
  const fact = (name, text) => { if (text) facts.append(make("dt", {}, name), make("dd", {}, text)); };
  fact("size", bytes(storage.bytes) + " (" + storage.bytes.toLocaleString("en") + " bytes)");
  fact("kind", storage.kind);
  fact("module", storage.module);
  fact("line", storage.source);
  fact("used by", storage.uses.length + (storage.uses.length === 1 ? " op" : " ops") +
    (storage.uses.length ? ", from " + opText(storage.uses[0]) + " to " + opText(storage.uses.at(-1)) : ""));
  fact("copies", storage.out + " out, " + storage.in + " in a step");
  fact("decision", storage.fate);
  const gaps = make("ol", {}, ...storage.gaps.map(gap => make("li", {}, gapText(gap))));
  byId("detail").replaceChildren(make("h3", {}, storage.name), facts, storage.gaps.length ? gaps : "");
  if (scroll) byId("detail").scrollIntoView({ block: "nearest" });
  redraw();
}

function fillFilters() {
  const fill = (id, values) => byId(id).append(make("option", { value: "" }, "all"),
    ...values.map(value => make("option", { value }, value)));
  fill("kind", KINDS.filter(kind => content.storages.some(storage => storage.kind === kind)));
  fill("fate", Object.keys(content.fates).sort());
  for (const id of ["find", "kind", "fate"]) {
    byId(id).addEventListener("input", () => { shownRows = ROWS; fillRows(); });
  }
  byId("more").addEventListener("click", () => { shownRows += ROWS; fillRows(); });
  byId("detail").append(make("p", { class: "note" }, "Choose a storage, here or in the chart, to see the decisions " +
    "about it. The chart then marks its copies and the ops that use it."));
}

function fillNotes() {
  for (const [name, text] of content.notes) byId("notes").append(make("dt", {}, name), make("dd", {}, text));
}

byId("title").textContent = content.title;
byId("summary").append(...sentence());
fillSpent();
fillWhich();
fillLegend();
fillWaits();
fillCurve();
fillHelps();
fillFilters();
fillRows();
fillNotes();
listen();
if (byId("curve")) new ResizeObserver(fillCurve).observe(byId("curve"));
draw();
