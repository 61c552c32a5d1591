"use strict";
// Draws what report.py has counted: every number comes from the JSON in #data, this file only places it on a canvas.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const hidden = new Set(); // indices of sides that the reader has switched off
  const figures = []; // one function for each chart: draws it anew, in the colours and at the width of now

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const drawAll = () => figures.forEach((draw) => draw());
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  const short = (value) => String(Number(value.toPrecision(3)));
  const seconds = (value) => (value === 0 ? "0" : Math.abs(value) < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`);
  const percent = (value) => `${Number((value * 100).toFixed(1))} %`;
  const big = (value) => (Math.abs(value) >= 10000 ? Math.round(value).toLocaleString("en") : short(value));
  const bytes = (value) =>
    value >= 2 ** 30 ? `${short(value / 2 ** 30)} GiB` : value === 0 ? "0" : `${short(value / 2 ** 20)} MiB`;

  const BYTE_STEPS = Array.from({ length: 24 }, (_, power) => 2 ** (20 + power));

  // Round marks on a logarithmic axis: 1, 2, 5 of each decade where there is room, otherwise only the 1.
  function logMarks(low, high, room) {
    const marks = [];
    const decades = Math.log10(high / low);
    const steps = decades * 3 <= room ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const step of steps) {
        const mark = Number((step * 10 ** power).toPrecision(1));
        if (mark >= low && mark <= high) marks.push(mark);
      }
    return marks;
  }

  function tooltip(describe) {
    const tip = document.createElement("div");
    tip.className = "tip";
    const show = (plot) => {
      const { left, top } = plot.cursor;
      const lines = left >= 0 ? describe(plot) : null;
      tip.style.display = lines ? "block" : "none";
      if (!lines) return;
      tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
      const width = plot.over.clientWidth;
      tip.style.left = `${Math.max(0, left + 14 + tip.offsetWidth > width ? left - tip.offsetWidth - 10 : left + 14)}px`;
      tip.style.top = `${Math.max(0, Math.min(top + 10, plot.over.clientHeight - tip.offsetHeight))}px`;
    };
    return { hooks: { init: (plot) => plot.over.append(tip), setCursor: show } };
  }

  // A straight line across the plot with its name: an objective or a target.
  function marker(plot, { x, y, name }) {
    const { left, top, width, height } = plot.bbox;
    const ratio = uPlot.pxRatio;
    const ctx = plot.ctx;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("--objective");
    ctx.lineWidth = 1.25 * ratio;
    ctx.setLineDash([2 * ratio, 2 * ratio]);
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.beginPath();
    if (x !== undefined) {
      const at = plot.valToPos(x, "x", true);
      ctx.moveTo(at, top);
      ctx.lineTo(at, top + height);
      ctx.textAlign = at > left + width / 2 ? "right" : "left";
      ctx.fillText(name, at, top - 5 * ratio);
    } else {
      const at = plot.valToPos(y, "y", true);
      ctx.moveTo(left, at);
      ctx.lineTo(left + width, at);
      ctx.textAlign = "left";
      ctx.fillText(name, left + 5 * ratio, at + 13 * ratio);
    }
    ctx.stroke();
    ctx.restore();
  }

  function axis(extra) {
    const line = { stroke: color("--grid"), width: 1 };
    return {
      stroke: color("--muted"), font: "11px system-ui, sans-serif", grid: line, ticks: { ...line, size: 4 }, gap: 4, ...extra,
    };
  }

  // options: x, lines [{side, y}], xText, yText, xRange, yRange, yIncrs, log, stepped, points, markers, height, zoom
  function lineChart(box, options) {
    const { x, xText, yText, log = false, markers = [], zoom = false } = options;
    const lines = options.lines.filter(({ side }) => !hidden.has(side));
    const width = box.clientWidth;
    const room = Math.max(2, Math.floor((width - 60) / 62));
    const [low, high] = options.xRange ?? [x[0], x[x.length - 1]];
    const paths = options.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    box.replaceChildren();
    new uPlot(
      {
        width,
        height: options.height ?? 230,
        legend: { show: false },
        padding: [18, 14, 0, 0],
        cursor: { y: false, drag: { x: zoom, y: false }, points: { size: 5 } },
        scales: {
          x: { time: false, distr: log ? 3 : 1, range: (_, from, to) => (zoom ? [from, to] : [low, high]) },
          y: { range: options.yRange ?? ((_, __, top) => [0, top > 0 ? top * 1.08 : 1]) },
        },
        axes: [
          axis({
            size: 28,
            space: 62,
            values: (_, marks) => marks.map(xText),
            ...(log && { splits: () => logMarks(low, high, room), filter: (_, marks) => marks }),
          }),
          axis({ size: 58, space: 34, values: (_, marks) => marks.map(yText), ...(options.yIncrs && { incrs: options.yIncrs }) }),
        ],
        series: [
          {},
          ...lines.map(({ side }) => ({
            stroke: color(`--side-${data.sides[side].color}`),
            dash: data.sides[side].dash,
            width: 1.75,
            spanGaps: true,
            points: { show: options.points ?? false, size: 6 },
            paths,
          })),
        ],
        hooks: { draw: [(plot) => markers.forEach((each) => marker(plot, each))] },
        plugins: [
          tooltip((plot) => {
            const at = plot.cursor.idx;
            if (at == null) return null;
            const values = lines.filter(({ y }) => y[at] != null);
            return [xText(x[at]), ...values.map(({ side, y }) => `${data.sides[side].name}: ${yText(y[at])}`)];
          }),
        ],
      },
      [x, ...lines.map(({ y }) => y)],
      box,
    );
  }

  function empty(box, text) {
    const note = Object.assign(document.createElement("p"), { className: "muted", textContent: text });
    box.replaceChildren(note);
  }

  const chosen = (name) => Number(document.querySelector(`select[data-choice="${name}"]`)?.value ?? 0);

  // ---- latency ----
  const lastingLog = {}; // by latency: what the reader chose, for all groups
  for (const box of all("[data-latency]")) {
    const name = box.dataset.latency;
    const toggle = box.closest("figure").querySelector(".toggle");
    const draw = () => {
      const curve = data.latency[chosen("latency")]?.[name];
      toggle.hidden = !curve;
      if (!curve) return empty(box, "No request was answered.");
      const objective = data.slo[name];
      const positive = curve.x.filter((value) => value > 0);
      const low = positive[0];
      const high = positive[positive.length - 1];
      const log = low !== undefined && (lastingLog[name] ?? high / low > 30);
      toggle.hidden = low === undefined;
      toggle.textContent = log ? "linear axis" : "log axis";
      toggle.onclick = () => {
        lastingLog[name] = !log;
        draw();
      };
      const skip = log ? curve.x.length - positive.length : 0; // zeros have no place on a logarithmic axis
      lineChart(box, {
        x: curve.x.slice(skip),
        lines: curve.lines.map(({ side, y }) => ({ side, y: y.slice(skip) })),
        xText: seconds,
        yText: percent,
        xRange: log ? [low / 1.05, high * 1.05] : [0, (high || 1) * 1.03],
        yRange: [0, 1.02],
        log,
        stepped: true,
        markers: objective == null ? [] : [{ x: objective, name: `objective ${seconds(objective)}` }],
      });
    };
    figures.push(draw);
  }

  // ---- sweep ----
  for (const box of all("[data-sweep]")) {
    const share = box.dataset.sweep === "share";
    figures.push(() => {
      const x = data.sweep.rates;
      const pad = (x[x.length - 1] - x[0]) * 0.04 || x[0] * 0.2;
      lineChart(box, {
        x,
        lines: data.sweep.lines.map((line) => ({ side: line.side, y: line[box.dataset.sweep] })),
        xText: (value) => `${short(value)}/s`,
        yText: share ? percent : (value) => `${short(value)}/s`,
        xRange: [x[0] - pad, x[x.length - 1] + pad],
        yRange: share ? [0, 1.04] : undefined,
        points: true,
        markers: share ? [{ y: data.sweep.target, name: `target ${percent(data.sweep.target)}` }] : [],
      });
    });
  }

  // ---- over time ----
  for (const box of all("[data-time]")) {
    const name = box.dataset.time;
    figures.push(() => {
      const group = data.times[chosen("time")];
      const lines = group?.[name] ?? [];
      if (!lines.length) return empty(box, name === "memory" ? "Nobody could read the server's memory." : "No tokens arrived.");
      if (name === "throughput") document.getElementById("bin-note").textContent = `Counted in bins of ${short(group.bin_s)} s.`;
      lineChart(box, {
        x: lines[0].y.map((_, index) => index * group.bin_s),
        lines,
        xText: (value) => `${short(value)} s`,
        yText: name === "memory" ? bytes : big,
        yIncrs: name === "memory" ? BYTE_STEPS : undefined,
        zoom: true,
      });
    });
  }

  // ---- timeline of requests ----
  const timelineBox = document.querySelector("[data-timeline]");
  if (timelineBox)
    figures.push(() => {
      const run = data.timelines[chosen("timeline")];
      if (!run.sent.length) return empty(timelineBox, "This run has no requests.");
      const rows = run.sent.length;
      const last = Math.max(...run.end) * 1.01 || 1;
      document.getElementById("timeline-note").textContent = run.note;
      timelineBox.replaceChildren();
      new uPlot(
        {
          width: timelineBox.clientWidth,
          height: Math.min(520, Math.max(140, rows * 9 + 40)),
          legend: { show: false },
          padding: [6, 14, 0, 10],
          cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
          scales: { x: { time: false, range: (_, from, to) => [from, to] }, y: { dir: -1, range: [0, rows] } },
          axes: [axis({ size: 28, space: 62, values: (_, marks) => marks.map((mark) => `${short(mark)} s`) }), axis({ show: false })],
          series: [{}, { paths: () => null, points: { show: false } }],
          hooks: {
            drawSeries: [
              (plot) => {
                const ctx = plot.ctx;
                const { left, top, width, height } = plot.bbox;
                const row = height / rows;
                const least = 2 * uPlot.pxRatio; // so that a short request of a long run can be seen
                const bar = Math.max(1, row > 4 ? row * 0.72 : row * 0.9);
                const [wait, decode, bad] = ["--wait", "--decode", "--bad"].map(color);
                const fill = (style, from, to, index) => {
                  const a = plot.valToPos(from, "x", true);
                  ctx.fillStyle = style;
                  ctx.fillRect(a, top + index * row, Math.max(least, plot.valToPos(to, "x", true) - a), bar);
                };
                ctx.save();
                ctx.beginPath();
                ctx.rect(left, top, width, height);
                ctx.clip();
                for (let index = 0; index < rows; index++) {
                  const [sent, first, end] = [run.sent[index], run.first[index], run.end[index]];
                  if (run.failed[index]) fill(bad, sent, end, index);
                  else {
                    fill(wait, sent, first ?? end, index);
                    if (first != null) fill(decode, first, end, index);
                  }
                }
                ctx.restore();
              },
            ],
          },
          plugins: [
            tooltip((plot) => {
              const index = Math.floor((plot.cursor.top / plot.over.clientHeight) * rows);
              if (!(index >= 0 && index < rows)) return null;
              const [sent, first, end] = [run.sent[index], run.first[index], run.end[index]];
              return [
                run.id[index],
                `sent at ${short(sent)} s`,
                first == null ? "no token" : `first token after ${seconds(first - sent)}`,
                run.failed[index] ? `failed (${run.failed[index]}) after ${seconds(end - sent)}` : `whole after ${seconds(end - sent)}`,
              ];
            }),
          ],
        },
        [[0, last], [0, rows]],
        timelineBox,
      );
    });

  // ---- controls ----
  for (const button of all(".legend button"))
    button.addEventListener("click", () => {
      const side = Number(button.dataset.side);
      if (!hidden.delete(side)) hidden.add(side);
      for (const twin of all(`.legend button[data-side="${side}"]`)) twin.setAttribute("aria-pressed", String(!hidden.has(side)));
      drawAll();
    });
  for (const select of all("select[data-choice]")) select.addEventListener("change", drawAll);
  document.querySelector("button.copy")?.addEventListener("click", async ({ target }) => {
    const text = document.getElementById("command");
    getSelection().selectAllChildren(text);
    target.textContent = await navigator.clipboard.writeText(text.textContent).then(
      () => "Copied",
      () => "Selected: copy it with the keyboard", // pages from a file may not write to the clipboard everywhere
    );
  });

  // ---- when to draw ----
  let width = root.clientWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (root.clientWidth === width || "printing" in root.dataset) return;
    width = root.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => {
    root.dataset.printing = "";
    drawAll();
  });
  addEventListener("afterprint", () => {
    delete root.dataset.printing;
    drawAll();
  });
  drawAll();
})();
