// A page with one curve for each policy.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f5bd0", "#b8ab1c", "#6a6f78"];
const drawn = content.lines.map((line, number) => ({ ...line, colour: COLOURS[number % COLOURS.length] }));

byId("title").textContent = content.title;
byId("summary").textContent = "Step time against budget, predicted, by policy";
for (const line of drawn) {
  byId("legend").append(make("li", {}, make("span", { class: "swatch", style: "background:" + line.colour }), line.name));
}
const drawSweep = () => drawCurves(byId("curve"), drawn, content.floor, null);
drawSweep();
new ResizeObserver(drawSweep).observe(byId("curve"));
