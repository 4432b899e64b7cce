// One step over time: memory above the queues, on one time axis.

const KINDS = ["constant", "buffer", "parameter", "optimizer state", "state range", "gradient", "activation", "input",
  "output", "workspace"];
const SPENT = [
  ["ops", "ops", "ops"],
  ["again", "again", "recomputed ops"],
  ["for_copies", "wait", "waits for copies"],
  ["for_room", "room", "waits for memory"],
  ["for_others", "on-demand", "waits for collectives"],
  ["end", "copies-out", "last copies"],
  ["between", "between", "between ops"],
];
const state = { timeline: 0, selected: null, cursor: null, wait: null };

function opText(op) {
  const [name, module] = content.ops[op];
  return module ? name + " in " + module : name;
}

const storageById = new Map(content.storages.map(storage => [storage.id, storage]));

function storageText(id) {
  const storage = storageById.get(id);
  return storage ? storage.name : id < 0 ? "scratch memory" : "storage " + id;
}

function instructionText(index) {
  const [lane, id, mode] = content.instructions[index];
  if (runsOps(lane)) return opText(id) + ["", ", recomputed", ", on demand"][mode];
  return (content.lanes[lane].startsWith("copies in") ? "copy-in of " : "copy-out of ") + storageText(id);
}

// Whether a lane runs ops or collectives, rather than copies.
function runsOps(lane) {
  return lane === 0 || content.lanes[lane] === "collectives";
}

// The instructions of each lane, in the order in which they run.
const lanes = content.lanes.map(() => []);
content.instructions.forEach((instruction, index) => lanes[instruction[0]].push(index));
const runOf = new Map();
content.instructions.forEach(([lane, id, mode], index) => {
  if (runsOps(lane) && mode !== 1) runOf.set(id, index);
});

function now() { return content.timelines[state.timeline]; }

const chart = byId("chart");
const longest = Math.max(1, ...content.timelines.map(timeline => timeline.seconds * 1e6));
const view = { from: 0, to: longest };
const TOP = 18, GAP = 12, ROW = 26, AXIS = 26;
let frame = null;

function layout() {
  const width = chart.clientWidth, height = chart.clientHeight;
  const left = width < 560 ? 64 : 92;
  const lanesTop = height - AXIS - ROW * content.lanes.length;
  return { width, height, left, right: width - 10, lanesTop, memoryBottom: lanesTop - GAP };
}

function xOf(time, at) { return at.left + (time - view.from) / (view.to - view.from) * (at.right - at.left); }
function timeOf(x, at) { return view.from + (x - at.left) / (at.right - at.left) * (view.to - view.from); }

// The last index in a rising list whose value is at most the given one; -1 if there is none.
function lastNotAbove(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function byteTicks(to) {
  const step = 2 ** Math.ceil(Math.log2(to / 5));
  return Array.from({ length: Math.floor(to / step) + 1 }, (_, number) => number * step);
}

function highest() {
  return 1.1 * Math.max(content.budget, ...content.timelines.map(timeline => timeline.peak));
}

function draw() {
  frame = null;
  const at = layout(), scale = window.devicePixelRatio || 1;
  chart.width = Math.round(at.width * scale);
  chart.height = Math.round(at.height * scale);
  const pen = chart.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  drawAxes(pen, at);
  pen.save();
  pen.beginPath();
  pen.rect(at.left, 0, at.right - at.left, at.height - AXIS + 2);
  pen.clip();
  drawMemory(pen, at);
  drawLanes(pen, at);
  drawCursor(pen, at);
  pen.restore();
  chart.setAttribute("data-drawn", String(1 + Number(chart.getAttribute("data-drawn") || 0)));
}

function redraw() { if (frame === null) frame = requestAnimationFrame(draw); }

function drawAxes(pen, at) {
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const tick of byteTicks(highest())) {
    const y = Math.round(yOf(tick, at)) + .5;
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(at.left, y); pen.lineTo(at.right, y); pen.stroke();
    pen.fillStyle = colour("soft");
    pen.fillText(bytes(tick), at.left - 6, y);
  }
  pen.textBaseline = "top";
  const places = ticks(view.from, view.to, at.width < 560 ? 4 : 8);
  for (const tick of places) {
    const x = xOf(tick, at);
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(x, TOP); pen.lineTo(x, at.height - AXIS); pen.stroke();
    pen.textAlign = x > at.right - 30 ? "right" : "center";
    pen.fillText(tickText(tick, places), x, at.height - AXIS + 8);
  }
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  content.lanes.forEach((name, lane) => {
    pen.fillStyle = colour("soft");
    pen.fillText(at.left < 80 ? name.replace("copies ", "") : name, at.left - 6, at.lanesTop + ROW * (lane + .5));
  });
}

function tickText(tick, places) {
  const step = places.length > 1 ? places[1] - places[0] : tick || 1;
  if (step >= 1e5) return (tick / 1e6).toFixed(step >= 1e6 ? 0 : 1) + " s";
  if (step >= 100) return (tick / 1e3).toFixed(step >= 1e3 ? 0 : 1) + " ms";
  return tick.toFixed(0) + " µs";
}

function yOf(count, at) { return at.memoryBottom - count / highest() * (at.memoryBottom - TOP); }

// A step function as a path, from the first moment to the end of the step.
function follow(pen, times, levels, end, at, forward) {
  const last = times.length - 1;
  if (forward) {
    for (let i = 0; i <= last; i++) {
      pen.lineTo(xOf(times[i], at), yOf(levels[i], at));
      pen.lineTo(xOf(i < last ? times[i + 1] : end, at), yOf(levels[i], at));
    }
  } else {
    for (let i = last; i >= 0; i--) {
      pen.lineTo(xOf(i < last ? times[i + 1] : end, at), yOf(levels[i], at));
      pen.lineTo(xOf(times[i], at), yOf(levels[i], at));
    }
  }
}

function totalOf(timeline) {
  const { times, held } = timeline.memory;
  const lists = Object.values(held);
  return times.map((_, i) => lists.reduce((sum, list) => sum + list[i], 0));
}

function drawMemory(pen, at) {
  const { times, held } = now().memory, end = now().seconds * 1e6;
  let below = times.map(() => 0);
  for (const kind of KINDS) {
    if (!held[kind]) continue;
    const above = below.map((level, i) => level + held[kind][i]);
    pen.fillStyle = colour(kind);
    pen.beginPath();
    follow(pen, times, above, end, at, true);
    follow(pen, times, below, end, at, false);
    pen.closePath();
    pen.fill();
    below = above;
  }
  pen.strokeStyle = colour("mark");
  pen.setLineDash([2, 3]);
  content.timelines.forEach((timeline, number) => {
    if (number === state.timeline) return;
    pen.beginPath();
    follow(pen, timeline.memory.times, totalOf(timeline), timeline.seconds * 1e6, at, true);
    pen.stroke();
  });
  const y = yOf(content.budget, at);
  pen.strokeStyle = pen.fillStyle = colour("budget");
  pen.lineWidth = 2;
  pen.setLineDash([7, 4]);
  pen.beginPath(); pen.moveTo(at.left, y); pen.lineTo(at.right, y); pen.stroke();
  pen.setLineDash([]);
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "bottom";
  pen.fillText("budget " + bytes(content.budget), at.right - 4, y - 4);
}

function laneColour(lane, mode) {
  if (runsOps(lane)) return colour(["ops", "again", "on-demand"][mode]);
  return colour(content.lanes[lane].startsWith("copies in") ? "copies-in" : "copies-out");
}

function touchesSelected(index) {
  const [lane, id] = content.instructions[index];
  if (state.selected === null) return false;
  const storage = storageById.get(state.selected);
  return runsOps(lane) ? storage !== undefined && storage.uses.includes(id) : id === state.selected;
}

function drawLanes(pen, at) {
  const { starts, ends, waits } = now();
  for (const wait of waits) {
    const x = xOf(wait.start, at), width = Math.max(xOf(wait.start + wait.length, at) - x, 1.5);
    pen.fillStyle = colour("wait");
    pen.fillRect(x, at.lanesTop + 1, width, ROW - 2);
  }
  lanes.forEach((line, lane) => {
    const top = at.lanesTop + ROW * lane + 4, height = ROW - 8;
    const colours = [0, 1, 2].map(mode => laneColour(lane, mode));
    for (const index of line) {
      if (ends[index] < view.from || starts[index] > view.to) continue;
      const x = xOf(starts[index], at), width = xOf(ends[index], at) - x;
      pen.fillStyle = colours[content.instructions[index][2]];
      // A thin space between neighbours that are wide enough.
      pen.fillRect(x, top, width > 3 ? width - .7 : Math.max(width, .5), height);
      if (touchesSelected(index)) {
        pen.fillStyle = colour("accent");
        pen.fillRect(x, top - 4, Math.max(width, 2), 4);
        pen.fillRect(x, top + height, Math.max(width, 2), 4);
      }
    }
  });
}

function drawCursor(pen, at) {
  if (state.cursor === null) return;
  const { starts, ends } = now(), lane = content.instructions[state.cursor][0];
  const x = xOf(starts[state.cursor], at), width = Math.max(xOf(ends[state.cursor], at) - x, 3);
  pen.strokeStyle = colour("mark");
  pen.lineWidth = 2;
  pen.strokeRect(x - 1, at.lanesTop + ROW * lane + 2, width + 2, ROW - 4);
  pen.lineWidth = 1;
}

// Describe a moment.
function describe(time) {
  const { times, held } = now().memory, place = Math.max(lastNotAbove(times, time), 0);
  const levels = KINDS.filter(kind => held[kind] && held[kind][place]).map(kind => [held[kind][place], kind]);
  const total = levels.reduce((sum, [count]) => sum + count, 0);
  levels.sort((a, b) => b[0] - a[0]);
  const running = lanes.map(line => line.find(index => now().starts[index] <= time && time < now().ends[index]))
    .filter(index => index !== undefined).map(instructionText);
  const wait = now().waits.find(candidate => candidate.start <= time && time < candidate.start + candidate.length);
  const parts = [
    micro(time) + ": " + bytes(total) + " in use (" +
      levels.slice(0, 3).map(([count, kind]) => kind + " " + bytes(count)).join(", ") + ")",
  ];
  if (wait) parts.push("ops wait: " + wait.text);
  return parts.concat(running).join(" · ");
}

function readInstruction(index) {
  const { starts, ends } = now();
  byId("reading").textContent = content.lanes[content.instructions[index][0]] + ": " + instructionText(index) + " · " +
    micro(ends[index] - starts[index]) + " from " + micro(starts[index]) + " on";
}

function zoom(factor, around) {
  const middle = around === undefined ? (view.from + view.to) / 2 : around;
  const width = Math.min(Math.max((view.to - view.from) * factor, longest / 5000), longest);
  const part = (middle - view.from) / (view.to - view.from);
  show(middle - part * width, width);
}

function show(from, width) {
  view.from = Math.min(Math.max(from, 0), longest - width);
  view.to = view.from + width;
  redraw();
}

function reveal(start, end) {
  const width = Math.min(Math.max((end - start) * 12, longest / 40), longest);
  show((start + end) / 2 - width / 2, width);
}

function goTo(index) {
  state.cursor = index;
  const { starts, ends } = now();
  if (starts[index] < view.from || ends[index] > view.to) {
    show((starts[index] + ends[index] - view.to + view.from) / 2, view.to - view.from);
  }
  readInstruction(index);
  redraw();
}

function move(by) {
  if (state.cursor === null) return goTo(lanes[0][0]);
  const line = lanes[content.instructions[state.cursor][0]];
  const place = line.indexOf(state.cursor) + by;
  return goTo(line[Math.min(Math.max(place, 0), line.length - 1)]);
}

function change(by) {
  if (state.cursor === null) return goTo(lanes[0][0]);
  const lane = content.instructions[state.cursor][0], time = now().starts[state.cursor];
  for (let other = lane + by; other >= 0 && other < lanes.length; other += by) {
    if (!lanes[other].length) continue;
    const near = lastNotAbove(lanes[other].map(index => now().starts[index]), time);
    return goTo(lanes[other][Math.max(near, 0)]);
  }
  return undefined;
}

function nextWait(by) {
  const { waits } = now();
  if (!waits.length) return;
  state.wait = state.wait === null ? (by > 0 ? 0 : waits.length - 1) : (state.wait + by + waits.length) % waits.length;
  showWait(waits[state.wait]);
}

function showWait(wait) {
  reveal(wait.start, wait.start + wait.length);
  byId("reading").textContent = micro(wait.length) + ": " + (wait.who ? wait.who + " " : "") + wait.text + ". " +
    wait.why;
  state.cursor = wait.cause;
  redraw();
}

function showStorageOf(index) {
  const [lane, target] = content.instructions[index];
  // For an op, the largest storage that it uses.
  const id = lane > 0 ? target : (content.storages.find(storage => storage.uses.includes(target)) || { id: -1 }).id;
  if (storageById.has(id)) select(id);
}

function hit(event) {
  const at = layout(), box = chart.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top, time = timeOf(x, at);
  const lane = Math.floor((y - at.lanesTop) / ROW);
  const reach = 3 * (view.to - view.from) / (at.right - at.left);
  let index;
  if (lane >= 0 && lane < lanes.length) {
    index = lanes[lane].find(i => now().starts[i] - reach <= time && time <= now().ends[i] + reach);
  }
  return { x, time, index };
}

function listen() {
  const fingers = new Map();
  let moved = false, began = null;
  chart.addEventListener("pointerdown", event => {
    fingers.set(event.pointerId, event);
    chart.setPointerCapture(event.pointerId);
    moved = false;
    began = { x: event.clientX, from: view.from };
  });
  chart.addEventListener("pointermove", event => {
    const at = layout(), perPixel = (view.to - view.from) / (at.right - at.left);
    if (fingers.size === 2 && fingers.has(event.pointerId)) {
      const [second] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, finger]) => finger);
      const before = Math.abs(fingers.get(event.pointerId).clientX - second.clientX);
      const after = Math.abs(event.clientX - second.clientX);
      if (before > 8 && after > 8) zoom(before / after, hit(event).time);
      moved = true;
      fingers.set(event.pointerId, event);
    } else if (fingers.has(event.pointerId) && began) {
      moved = moved || Math.abs(event.clientX - began.x) > 4;
      if (moved) show(began.from + (began.x - event.clientX) * perPixel, view.to - view.from);
    } else {
      const { time, index } = hit(event);
      if (index !== undefined) readInstruction(index);
      else if (time >= view.from && time <= view.to) byId("reading").textContent = describe(time);
    }
  });
  const release = event => {
    if (event.type === "pointerup" && !moved) {
      const { time, index } = hit(event);
      if (index === undefined) byId("reading").textContent = describe(Math.max(time, 0));
      else { goTo(index); showStorageOf(index); }
    }
    fingers.delete(event.pointerId);
  };
  chart.addEventListener("pointerup", release);
  chart.addEventListener("pointercancel", release);
  chart.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : .8, hit(event).time);
  }, { passive: false });
  const keys = {
    ArrowRight: () => move(1), ArrowLeft: () => move(-1), ArrowDown: () => change(1), ArrowUp: () => change(-1),
    Enter: () => { if (state.cursor !== null) showStorageOf(state.cursor); },
    "+": () => zoom(.6, cursorTime()), "=": () => zoom(.6, cursorTime()), "-": () => zoom(1.7, cursorTime()),
    0: () => show(0, longest), n: () => nextWait(1), p: () => nextWait(-1),
  };
  chart.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("zoom-in").addEventListener("click", () => zoom(.6, cursorTime()));
  byId("zoom-out").addEventListener("click", () => zoom(1.7, cursorTime()));
  byId("zoom-all").addEventListener("click", () => show(0, longest));
  new ResizeObserver(redraw).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

function cursorTime() {
  return state.cursor === null ? undefined : (now().starts[state.cursor] + now().ends[state.cursor]) / 2;
}
