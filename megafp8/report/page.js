"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const palette = () => dark.matches
    ? ["#6cb0ff", "#ffa657", "#7ee787", "#ff7b9c", "#c8a6ff", "#5fd7d7", "#f2d160", "#b5bfc9"]
    : ["#1f6fd1", "#d9680b", "#1f8a3d", "#cf2f62", "#7d4bc9", "#0f8f8f", "#a98500", "#5c6773"];
  // The curves of each further round of the palette have another dash.
  const dashes = [undefined, [2, 2], [9, 3], [9, 3, 2, 3]];
  const short = (v) => v == null ? "–" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3)
    ? v.toExponential(2) : String(+v.toPrecision(5));

  // ---- curves
  const wholeSteps = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((n) => [n, 2 * n, 5 * n]);
  const drawn = [];
  function draw(box, chart, isLog) {
    box.querySelector(".plot").replaceChildren();
    const colors = palette();
    const ranged = chart.series.filter((s) => s.low);  // of several seeds: a band from least to most
    const tables = chart.series.map((s) => [s.x, s.y])
      .concat(ranged.flatMap((s) => [[s.x, s.low], [s.x, s.high]]));
    const joined = uPlot.join(tables);
    const several = chart.series.filter((s) => !s.points).length > 1;
    const many = chart.series.filter((s) => !s.points).length > 24;
    const series = [{ label: "step" }].concat(chart.series.map((s) => ({
      label: s.label, stroke: colors[s.color % colors.length], width: s.points ? 2 : 1.4,
      dash: s.points ? [5, 4] : dashes[Math.floor(s.color / colors.length) % dashes.length],
      spanGaps: true,
      points: { show: s.points || s.x.length < 2, size: 6 },
      value: (u, v) => short(v),
    }))).concat(ranged.flatMap(() => [0, 1].map(() => ({ label: "", width: 0, spanGaps: true, points: { show: false } }))));
    const first = chart.series.length + 1;  // series of a band
    const ranges = ranged.map((s, i) => ({ series: [first + 2 * i + 1, first + 2 * i],
      fill: `${colors[s.color % colors.length]}2e` }));
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 },
      ticks: { stroke: style("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    // The phases of a run's precision are bands under the curve.
    const bands = (u) => (chart.phases || []).forEach((phase, i) => {
      const [left, right] = [phase.begin - 0.5, phase.end + 0.5].map((x) =>
        Math.min(Math.max(u.valToPos(x, "x", true), u.bbox.left), u.bbox.left + u.bbox.width));
      u.ctx.save();
      u.ctx.globalAlpha = 0.14;
      u.ctx.fillStyle = colors[(i + 2) % colors.length];
      u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
      u.ctx.restore();
    });
    const positive = chart.series.every((s) => s.y.every((v) => v == null || v > 0));
    const plot = new uPlot({
      width: Math.max(200, box.clientWidth), height: box.classList.contains("wide") ? 320 : 220,
      scales: { x: { time: false }, y: isLog && positive ? { distr: 3 } : {} },
      axes: [{ ...axis, incrs: wholeSteps, size: 34, label: "step", labelSize: 16, labelFont: axis.font }, { ...axis, size: 62, values: (u, vals) => vals.map((v) => v == null ? "" : short(v)) }],
      series, bands: ranges, legend: { show: !many }, cursor: { drag: { x: true, y: false } },
      hooks: { drawClear: [bands] },
    }, joined, box.querySelector(".plot"));
    // The legend shows the dash of a curve as well as its color.
    [...plot.root.querySelectorAll(".u-series")].slice(first).forEach((row) => { row.style.display = "none"; });
    [...plot.root.querySelectorAll(".u-marker")].slice(1, first).forEach((marker, i) => {
      const { dash = [24], stroke } = series[i + 1];
      let end = 0;
      const stops = dash.map((length, k) =>
        `${k % 2 ? "transparent" : stroke} ${end}px ${end += length}px`);
      marker.style.cssText =
        `width: 24px; height: 3px; background: repeating-linear-gradient(90deg, ${stops})`;
    });
    // Of several runs, validation has the color of its run, which the legend names once.
    if (several && !many)
      chart.series.forEach((s, i) => {
        if (s.points) plot.root.querySelectorAll(".u-series")[i + 1].style.display = "none";
      });
    return plot;
  }
  const named = new Set();  // the labels of the plots above
  for (const chart of data.charts) {
    const box = document.getElementById(chart.id);
    const labels = chart.series.filter((s) => !s.points).map((s) => s.label);
    box.classList.toggle("again", labels.every((label) => named.has(label)));
    labels.forEach((label) => named.add(label));
    let isLog = chart.log;
    const button = box.querySelector("button");
    const entry = { box, plot: null, again: () => { entry.plot = draw(box, chart, isLog); } };
    const name = () => { button.textContent = `to ${isLog ? "linear" : "log"} axis`; };
    button.addEventListener("click", () => { isLog = !isLog; name(); entry.again(); });
    name();
    entry.again();
    drawn.push(entry);
  }
  addEventListener("resize", () => {
    for (const { box, plot } of drawn)
      plot.setSize({ width: Math.max(200, box.clientWidth), height: plot.height });
  });

  // ---- heat maps: FP8 health, and the load of experts
  function shade(t) {  // a scale that also reads in grey: dark blue, green, yellow
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    const at = Math.min(0.9999, Math.max(0, t)) * (stops.length - 1), i = Math.floor(at), f = at - i;
    return stops[i].map((v, k) => Math.round(v + f * (stops[i + 1][k] - v)));
  }
  function drawMap(box, heat) {
    const role = box.querySelector("select.role").value;
    const measure = box.querySelector("select.measure");
    const measured = Object.keys(heat.maps[role]);
    const wanted = measured.includes(measure.value) ? measure.value : measured[0];
    measure.replaceChildren(...measured.map((m) => new Option(heat.titles[m], m, false, m === wanted)));
    measure.hidden = measured.length < 2;
    // Some measures are taken at few steps: only these are shown.
    const all = heat.maps[role][wanted];
    const taken = heat.steps.map((_, x) => x).filter((x) => all.some((row) => row[x] != null));
    const rows = all.map((row) => taken.map((x) => row[x])), atSteps = taken.map((x) => heat.steps[x]);
    const flat = rows.flat().filter((v) => v != null);
    const low = Math.min(...flat), high = Math.max(...flat);
    const canvas = box.querySelector("canvas");
    canvas.width = atSteps.length; canvas.height = rows.length;
    canvas.style.height = `${Math.max(120, Math.min(26, 900 / rows.length) * rows.length)}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    rows.forEach((row, y) => row.forEach((v, x) => {
      const at = 4 * (y * canvas.width + x);
      const [r, g, b] = v == null ? [128, 128, 128] : shade(high > low ? (v - low) / (high - low) : 0);
      image.data.set([r, g, b, v == null ? 40 : 255], at);
    }));
    context.putImageData(image, 0, 0);
    const every = Math.ceil(rows.length / 24);
    box.querySelector("ul").replaceChildren(...heat.rows.map((name, i) => {
      const item = document.createElement("li");
      item.textContent = i % every ? "" : name;
      return item;
    }));
    box.querySelector(".low").textContent = short(low);
    box.querySelector(".high").textContent = short(high);
    const steps = box.querySelector(".steps");
    steps.textContent = `steps ${atSteps[0]} to ${atSteps.at(-1)}, from left to right`;
    canvas.onmousemove = canvas.onclick = (event) => {
      const area = canvas.getBoundingClientRect();
      const x = Math.min(canvas.width - 1, Math.floor((event.clientX - area.left) / area.width * canvas.width));
      const y = Math.min(rows.length - 1, Math.floor((event.clientY - area.top) / area.height * rows.length));
      if (x < 0 || y < 0) return;
      steps.textContent = `step ${atSteps[x]}, ${heat.rows[y]}: ${short(rows[y][x])}`;
    };
  }
  for (const [name, heat] of Object.entries(data.heats)) {
    const box = document.getElementById(`map-${name}`), roles = Object.keys(heat.maps);
    box.querySelector("select.role").replaceChildren(...roles.map((r) => new Option(r.replace("_", " "), r)));
    box.querySelector(".scale").style.background =
      `linear-gradient(to right, ${[0, .25, .5, .75, 1].map((t) => `rgb(${shade(t)})`).join(",")})`;
    box.querySelectorAll("select").forEach((s) => s.addEventListener("change", () => drawMap(box, heat)));
    drawMap(box, heat);
  }
  dark.addEventListener("change", () => drawn.forEach((entry) => entry.again()));

  // ---- tables that are sorted by a click on a head
  const key = (cell) => cell.dataset.value === undefined || cell.dataset.value === "" ? null : +cell.dataset.value;
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      const isNumber = rows.some((row) => key(row.cells[index]) !== null);
      rows.sort((a, b) => {
        const [x, y] = [a.cells[index], b.cells[index]];
        if (!isNumber) return x.textContent.localeCompare(y.textContent, undefined, { numeric: true });
        if (key(x) === null || key(y) === null) return (key(x) === null) - (key(y) === null);
        return key(x) - key(y);
      });
      const empty = (row) => isNumber && key(row.cells[index]) === null;
      const full = rows.filter((row) => !empty(row)), rest = rows.filter(empty);
      table.tBodies[0].append(...(down ? full.reverse() : full), ...rest);
    }));
  }
})();
