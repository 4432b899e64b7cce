// Step time over budgets as lines, on a logarithmic axis of budgets.

// Ticks at round values, about ``count`` of them.
function ticks(from, to, count) {
  const rough = (to - from) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(factor => factor * power >= rough) * power;
  const values = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) values.push(tick);
  return values;
}

// Lines of points [budget, seconds, text], each with a colour, by default the page's; ``floor`` is a lower bound of the
// step time in seconds, and ``here`` the budget of a point to mark.
function drawCurves(place, lines, floor, here) {
  const points = lines.flatMap(line => line.points);
  // As wide as the place, so that its text has the size of the page's text.
  const width = Math.max(place.clientWidth, 280), height = lines.length > 1 ? 520 : 240;
  const left = 62, bottom = height - 34, right = width - 16, top = 14;
  const low = Math.min(...points.map(point => point[0])), high = Math.max(low + 1, ...points.map(point => point[0]));
  const topSeconds = 1.12 * Math.max(floor, ...points.map(point => point[1]));
  const x = budget => left + Math.log(budget / low) / Math.log(high / low) * (right - left);
  const y = value => bottom - value / topSeconds * (bottom - top);
  const svg = make("svg", { viewBox: "0 0 " + width + " " + height, role: "img",
    "aria-label": "Predicted step time at " + new Set(points.map(point => point[0])).size + " budgets" });
  for (const tick of ticks(0, topSeconds, 4)) {
    svg.append(make("line", { class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      make("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, seconds(tick)));
  }
  svg.append(make("line", { class: "floor", x1: left, x2: right, y1: y(floor), y2: y(floor) }),
    make("text", { x: right, y: y(floor) + 15, "text-anchor": "end" }, "ops alone"));
  for (const line of lines) {
    svg.append(make("path", { class: "curve", style: line.colour ? "stroke:" + line.colour : null,
      d: line.points.map((point, i) => (i ? "L" : "M") + x(point[0]) + " " + y(point[1])).join("") }));
    for (const [budget, value, text] of line.points) {
      svg.append(make("circle", { class: budget === here ? "here" : "dot", style: line.colour ? "fill:" + line.colour : null,
        cx: x(budget), cy: y(value), r: budget === here ? 7 : 4 },
      make("title", {}, bytes(budget) + ": " + seconds(value) + ", " + text)));
    }
  }
  let free = -100;
  for (const budget of [...new Set(points.map(point => point[0]))].sort((a, b) => a - b)) {
    if (x(budget) - free <= 66) continue;
    const end = x(budget) > right - 30 ? "end" : x(budget) < left + 30 ? "start" : "middle";
    svg.append(make("text", { x: x(budget), y: bottom + 20, "text-anchor": end }, bytes(budget)));
    free = x(budget);
  }
  place.replaceChildren(svg);
}
