"use strict";
(() => {
  const { about, records } = JSON.parse(document.getElementById("data").textContent);
  const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  const element = (id) => document.getElementById(id);
  const number = (v) => (v === undefined || v === null ? null : typeof v === "string" ? WORDS[v] : v);
  const last = records.length - 1;
  const session = about.sessions[about.sessions.length - 1] || {};
  const steps = records.map((r) => r.step);

  const column = (key) => records.map((r) => {
    const [name, i] = key.split("#");
    const v = r[name];
    return number(Array.isArray(v) ? (i === undefined ? v.length : v[i]) : v);
  });
  const shown = (v) => {
    if (v === null || v === undefined) return "–";
    if (Number.isNaN(v)) return "nan";
    if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
    const size = Math.abs(v);
    if (Number.isInteger(v) && size < 1e7) return v.toLocaleString("en-US");
    if (size && (size >= 1e6 || size < 1e-3)) return v.toExponential(3);
    return String(Number(v.toPrecision(5)));
  };
  const brief = (v) => {
    if (v === null || !Number.isFinite(v)) return shown(v);
    const size = Math.abs(v);
    if (size && (size >= 1e6 || size < 1e-3)) return v.toExponential(1);
    return Number(v.toPrecision(3)).toLocaleString("en-US", { maximumSignificantDigits: 3 });
  };

  // What the reader has set outlives a reload of the page: it refreshes itself.
  const KEY = "varreg-monitor:" + location.pathname;
  let state = { off: {}, log: {}, x: null, scroll: 0, open: false };
  try { Object.assign(state, JSON.parse(sessionStorage.getItem(KEY) || "{}")); } catch { /* none */ }
  const save = () => { try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch { /* none */ } };

  // Curves that coincide are told apart by their dashes.
  const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
  const layerSeries = (key) => {
    const n = about.layers.length;
    const on = Math.ceil(n / 6);
    const hue = (i) => `hsl(${Math.round((i * 300) / Math.max(1, n))} 65% ${isDark() ? 65 : 42}%)`;
    return about.layers.map((name, i) => (
      { key: `${key}#${i}`, label: name, color: () => hue(i), dash: DASHES[i % DASHES.length], off: i % on !== 0 }));
  };
  const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

  const CHARTS = [
    { id: "loss", title: "Loss", cap: true, series: [{ key: "loss", label: "loss", color: "blue" }],
      text: "The loss of the recorded steps, each of one batch." },
    { id: "noise", title: "Gradient noise scale and batch", log: true,
      series: [
        { key: "noise_scale_high", label: "at most", color: "blue", edge: true },
        { key: "noise_scale", label: "noise scale", color: "blue" },
        { key: "noise_scale_low", label: "at least", color: "blue", edge: true },
        { key: "batch", label: "batch", color: "red", dash: [6, 4] },
        { key: "cabs", label: "CABS", color: "gold", dash: [2, 3], off: true }],
      band: [1, 3],
      text: "The batch at which the mean gradient has as much noise as signal: tr Σ/|G|², from averages over many steps, with its interval at two standard errors. Where the batch is far below it, twice the batch nearly halves the steps; far above it, twice the batch is nearly twice the work. “∞” says that no signal is seen yet. CABS is lr·tr Σ/loss, a batch for plain SGD." },
    { id: "snr", title: "Signal-to-noise ratio", log: true, guide: 1,
      series: [{ key: "snr", label: "|ḡ| / its standard error", color: "green" }],
      text: "The size of a batch's mean gradient over its own standard error. Pure noise has 1, the dotted line." },
    { id: "grad", title: "Gradient: size and noise", log: true, cap: true,
      series: [
        { key: "grad_norm", label: "|ḡ|", color: "blue" },
        { key: "grad_error", label: "its standard error", color: "red", dash: [6, 4] }],
      text: "The norm of the mean gradient ḡ before clipping, and √(tr Σ/m), how far it is off for m samples. Where the two meet, a step follows noise." },
    { id: "lambda", title: "λ: length of steps, relative to the base optimizer",
      series: [
        { key: "lambda_q90", label: "90 %", color: "pink", edge: true },
        { key: "lambda_effective", label: "effective", color: "blue" },
        { key: "lambda_q50", label: "median", color: "pink", dash: [6, 4] },
        { key: "lambda_q10", label: "10 %", color: "pink", edge: true },
        { key: "lambda_mean", label: "mean", color: "green", dash: [2, 3], off: true }],
      band: [1, 4], guide: 1,
      text: "By λ each element's step is shorter or longer than the base optimizer's. Effective: the mean weighted by squared gradients; the base at that learning rate is the control for any gain. The band holds 80 % of all elements." },
    { id: "gauges", title: "Gauges of one batch",
      series: [
        { key: "norm_test", label: "norm test θ", color: "red" },
        { key: "evidence", label: "evidence", color: "gold", dash: [6, 4] }],
      text: "Norm test: the standard error over the size; near 1 the batch is mostly noise. Evidence: 1 − m·GSNR; above 0 the mean gradient looks like noise alone." },
    { id: "gsnr", title: "GSNR: mean of ḡ²/s² over elements", log: true,
      series: [{ key: "gsnr", label: "GSNR", color: "green" }],
      text: "The gradient signal-to-noise ratio (Liu et al. 2020). It includes the noise of ḡ, about 1/m." },
    { id: "verdicts", title: "Layers that are noise, and that are signal", whole: true,
      series: [
        { key: "noise_layers", label: "noise", color: "red" },
        { key: "signal_layers", label: "signal", color: "green", dash: [6, 4] }],
      text: "In how many layers the noise of the mean gradient is larger than its signal, and in how many it is smaller, each at two standard errors; of the others one cannot tell." },
    { id: "lr", title: "Learning rate", series: [{ key: "lr", label: "lr", color: "gold" }],
      text: "Of the first param group." },
    { id: "layer-scale", title: "Noise scale by layer", log: true, series: layerSeries("layer_noise_scale"),
      text: "As the noise scale, for each layer alone." },
    { id: "layer-snr", title: "Signal-to-noise ratio by layer", log: true, guide: 1, series: layerSeries("layer_snr"),
      text: "As the signal-to-noise ratio, for each layer alone." },
  ];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const colorOf = (s) => (typeof s.color === "function" ? s.color() : css(s.color));
  const faded = (color, alpha) => `color-mix(in srgb, ${color} ${alpha}%, transparent)`;
  const markOf = (s) => (s.edge ? faded(colorOf(s), 35) : colorOf(s));
  const isLog = (chart) => state.log[chart.id] ?? !!chart.log;

  // The largest value that is drawn: a loss that is far above both the first one and the median, of
  // a training that broke, would flatten all others.
  const capOf = (chart, values) => {
    const seen = values.filter((v) => v !== null && Number.isFinite(v) && v > 0);
    if (!chart.cap || !seen.length) return { end: Infinity, top: Infinity };
    const median = [...seen].sort((a, b) => a - b)[Math.floor((seen.length - 1) / 2)];
    const end = (isLog(chart) ? 1000 : 10) * Math.max(seen[0], median);
    const shown = Math.max(...seen.filter((v) => v <= end));
    return { end, top: shown * (isLog(chart) ? 4 : 1.25) };
  };

  // Values as they are drawn. The edges of a band may be far away, or infinite: they are drawn no
  // farther from the other lines than four times their values. What is shown as text is not changed.
  const drawn = (chart, raw) => {
    const positive = isLog(chart);
    const usable = (v) => v !== null && Number.isFinite(v) && (!positive || v > 0);
    const main = raw.filter((_, i) => !chart.series[i].edge && !chart.series[i].off).flat().filter(usable);
    const top = main.length ? Math.max(...main) * (positive ? 4 : 1.5) : 1;
    const low = main.length && positive ? Math.min(...main) / 4 : -Infinity;
    const caps = raw.map((values) => capOf(chart, values));
    const above = steps.filter((_, at) => raw.some((values, i) => usable(values[at]) && values[at] > caps[i].end)).length;
    if (chart.cap) chart.beyond.textContent = above ? `▲ far above: ${above}` : "";
    return raw.map((values, i) => values.map((v) => {
      if (v === null || Number.isNaN(v)) return null;
      if (!chart.series[i].edge) return !usable(v) ? null : v > caps[i].end ? caps[i].top : v;
      return Math.max(low, positive || !Number.isFinite(v) ? Math.min(top, v) : v);
    }));
  };

  const yRange = (chart) => (u, min, max) => {
    if (min === null || max === null || !Number.isFinite(min)) return isLog(chart) ? [1, 10] : [0, 1];
    if (isLog(chart)) {
      const room = Math.max(1.05, (max / min) ** 0.06);
      return [min / room, max * room];
    }
    const room = (max - min) * 0.08 || Math.abs(max) * 0.1 || 1;
    const floor = chart.whole || (min >= 0 && min < 0.4 * max) ? 0 : min - room;
    return [floor, max + room];
  };

  const logTicks = (u, axis, min, max) => {
    const decades = Math.log10(max / min);
    const keep = decades > 2.5 ? [1] : decades > 1.2 ? [1, 3] : decades > 0.5 ? [1, 2, 3, 5, 7] : [1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9];
    const ticks = [];
    const every = Math.max(1, Math.ceil(decades / 6));
    for (let e = Math.floor(Math.log10(min)); e <= Math.log10(max); e++) {
      for (const m of keep) {
        const v = Number(`${m}e${e}`);
        if (v >= min && v <= max && (every === 1 || e % every === 0)) ticks.push(v);
      }
    }
    return ticks.length > 1 ? ticks : [min, Math.sqrt(min * max), max].map((v) => Number(v.toPrecision(3)));
  };

  const guideLine = (value, color) => ({
    hooks: { draw: (u) => {
      const { min, max } = u.scales.y;
      if (value < min || value > max) return;
      const y = u.valToPos(value, "y", true), c = u.ctx;
      c.save();
      c.strokeStyle = color; c.lineWidth = devicePixelRatio; c.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
      c.beginPath(); c.moveTo(u.bbox.left, y); c.lineTo(u.bbox.left + u.bbox.width, y); c.stroke();
      c.restore();
    } },
  });

  const plots = [];
  const sync = uPlot.sync("varreg");

  const draw = (chart) => {
    const raw = chart.series.map((s) => column(s.key));
    const data = [steps, ...drawn(chart, raw)];
    const soft = css("soft"), grid = css("grid");
    const holder = chart.holder;
    const name = (s) => `${chart.id}/${s.key}`;
    const isOn = (s) => !(state.off[name(s)] ?? !!s.off);
    const series = [
      { label: "step", value: (u, v) => shown(v) },
      ...chart.series.map((s, i) => ({
        label: s.label, show: isOn(s), scale: "y", stroke: s.edge ? faded(colorOf(s), 45) : colorOf(s),
        width: s.edge ? 1 : 1.8, dash: s.dash, spanGaps: false,
        points: { show: records.length < 2 ? true : undefined, size: 4 },
        value: (u, v, si, at) => shown(at === null || at === undefined ? null : raw[i][at]),
      })),
    ];
    const short = (u, values) => values.map((v) => (v === null ? "" : brief(v)));
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
    const options = {
      width: Math.max(200, holder.clientWidth), height: 230, series,
      scales: { x: { time: false }, y: { distr: isLog(chart) ? 3 : 1, log: 10, range: yRange(chart) } },
      axes: [
        { ...axis, size: 30, values: short, space: 60 },
        { ...axis, size: 58, values: short, ...(isLog(chart) ? { splits: logTicks, filter: (u, splits) => splits } : {}),
          ...(chart.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] } : {}) },
      ],
      bands: chart.band ? [{ series: [chart.band[0], chart.band[1]], fill: faded(css(chart.series[chart.band[0] - 1].color), 16) }] : [],
      cursor: { sync: { key: "varreg", setSeries: false }, points: { size: 7 }, drag: { x: true, y: false, dist: 8 } },
      legend: { live: true, markers: { width: 0, fill: (u, i) => (i ? markOf(chart.series[i - 1]) : "transparent") } },
      plugins: chart.guide ? [guideLine(chart.guide, soft)] : [],
      hooks: {
        setSeries: [(u, i, change) => {
          if (i && change.show !== undefined) { state.off[name(chart.series[i - 1])] = !change.show; save(); }
        }],
        setScale: [(u, key) => {
          if (key !== "x" || !records.length) return;
          const { min, max } = u.scales.x;
          state.x = min <= steps[0] && max >= steps[last] ? null : [min, max];
          save();
        }],
        setCursor: [(u) => { if (u.cursor.idx === null || u.cursor.left < 0) rest(u); }],
      },
    };
    const u = new uPlot(options, data, holder);
    u.over.setAttribute("data-chart", chart.id);
    if (state.x) u.setScale("x", { min: state.x[0], max: state.x[1] });
    rest(u);
    return u;
  };
  const rest = (u) => { if (last >= 0 && u.legend.idx !== last) u.setLegend({ idx: last }, false); };

  const drawAll = () => {
    const x = state.x;
    plots.splice(0).forEach((u) => u.destroy());
    state.x = x;
    CHARTS.filter((c) => c.holder).forEach((c) => plots.push(draw(c)));
  };

  const build = () => {
    const home = element("charts"), words = element("words");
    for (const chart of CHARTS) {
      if (!chart.series.length || !chart.series.some((s) => column(s.key).some((v) => v !== null))) continue;
      const figure = document.createElement("figure");
      figure.id = chart.id;
      const caption = document.createElement("figcaption"), title = document.createElement("strong");
      title.textContent = chart.title;
      chart.beyond = document.createElement("small");
      chart.beyond.title = "records that are drawn at the upper end, as they are far above all others";
      caption.append(title, chart.beyond);
      if (!chart.whole) {
        const button = document.createElement("button");
        const label = () => { button.textContent = isLog(chart) ? "log axis" : "linear axis"; };
        button.title = "change the vertical axis";
        button.onclick = () => { state.log[chart.id] = !isLog(chart); save(); label(); drawAll(); };
        label();
        caption.append(button);
      } else {
        chart.beyond.textContent = "linear axis";
      }
      chart.holder = document.createElement("div");
      chart.holder.className = "plot";
      figure.append(caption, chart.holder);
      home.append(figure);
      const term = document.createElement("dt"), meaning = document.createElement("dd");
      term.textContent = chart.title;
      meaning.textContent = chart.text;
      words.append(term, meaning);
    }
    if (!home.children.length) {
      home.innerHTML = '<p class="empty">Nothing is recorded yet. The first step that is recorded appears here.</p>';
    }
  };

  const tile = (label, value, note) => {
    const box = document.createElement("div"), head = document.createElement("span");
    const main = document.createElement("b"), foot = document.createElement("span");
    box.className = "tile";
    head.textContent = label; main.textContent = value; foot.textContent = note;
    box.append(head, main, foot);
    element("tiles").append(box);
  };
  const clock = (t) => new Date(t * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const ordinal = (n) => (n === 1 ? "every step" : `every ${n.toLocaleString("en-US")} steps`);

  const tiles = () => {
    if (last < 0) return;
    const now = (key) => column(key)[last];
    // of a number that not every record has, the last that there is
    const latest = (key) => column(key).filter((v) => v !== null).pop() ?? null;
    const loss = latest("loss");
    tile("Step", shown(steps[last]), about.every ? `recorded ${ordinal(about.every)}` : "");
    if (loss !== null) tile("Loss", brief(loss), "of the last record");
    if (latest("noise_scale") !== null) {
      const [value, low, high] = ["noise_scale", "noise_scale_low", "noise_scale_high"].map(latest);
      const open = !Number.isFinite(high);
      const unclear = open && low <= 0;
      tile("Noise scale", unclear ? "not clear yet" : open ? `≥ ${brief(low)}` : brief(value),
        unclear ? `batch ${shown(latest("batch"))}` : `${open ? "" : `${brief(low)} to ${brief(high)} · `}batch ${shown(latest("batch"))}`);
      tile("Signal-to-noise", brief(latest("snr")), "pure noise has 1");
    }
    if (latest("lambda_effective") !== null) {
      tile("Effective λ", brief(latest("lambda_effective")), `80 %: ${brief(latest("lambda_q10"))} to ${brief(latest("lambda_q90"))}`);
    }
    if (about.layers.length) {
      tile("Layers that are noise", `${latest("noise_layers")} of ${about.layers.length}`, `${latest("signal_layers")} are signal`);
    }
    if (about.share !== undefined) tile("Cost of monitoring", `${(100 * about.share).toFixed(2)} %`, "of the time");
  };

  const layers = () => {
    const with_layers = records.filter((r) => r.noise_layers).pop();
    if (!with_layers || !about.layers.length) return;
    element("layers").hidden = false;
    const noise = new Set(with_layers.noise_layers), signal = new Set(with_layers.signal_layers);
    element("layers-text").textContent =
      `Noise (${noise.size}): the mean gradient of ${with_layers.batch} samples has more noise than signal there. ` +
      `Signal (${signal.size}): it has less. Of the others one cannot tell yet.`;
    about.layers.forEach((name, i) => {
      const kind = noise.has(i) ? "noise" : signal.has(i) ? "signal" : "";
      const item = document.createElement("li");
      item.className = kind;
      item.textContent = kind ? `${name} · ${kind}` : name;
      element("layers-list").append(item);
    });
  };

  const silent = Date.now() / 1000 - about.written;
  const isRunning = !about.end && about.refresh !== undefined && silent < about.stale;
  const heading = () => {
    element("title").textContent = document.title = session.title || "varreg monitor";
    const status = element("status");
    if (about.end) {
      status.textContent = `${about.end.end}, ${clock(about.end.time)}`;
      if (about.end.end !== "ended") status.className = "bad";
    } else if (about.refresh !== undefined && !isRunning) {
      status.textContent = `no news since ${clock(about.written)}: was it killed?`;
      status.className = "bad";
    } else {
      status.textContent = `running · as of ${clock(about.written)}`;
      status.className = "running";
    }
    const facts = [
      session.parameters ? `${session.parameters.toLocaleString("en-US")} parameters` : "",
      session.optimizer || "", session.groups ? `${session.groups} groups` : "",
      about.sessions.length > 1 ? `${about.sessions.length} sessions` : "",
      `torch ${session.torch || ""}`];
    element("about").textContent = `varreg monitor · ${facts.filter(Boolean).join(" · ")}. Drag over a figure to look closer, double-click to see all; click a name to switch it off.`;
  };

  // Again when there is something new; not while it is being looked at closely, or not at all.
  const refresh = () => {
    if (!isRunning) return;
    let touched = 0;
    for (const kind of ["pointermove", "pointerdown", "keydown"]) addEventListener(kind, () => { touched = Date.now(); }, { passive: true });
    const again = () => {
      if (document.hidden || Date.now() - touched < 4000) { setTimeout(again, 1000); return; }
      state.scroll = scrollY; save();
      location.reload();
    };
    setTimeout(again, 1000 * Math.max(1, about.refresh));
  };

  heading(); tiles(); build(); layers();
  drawAll();
  const details = document.querySelector("details");
  details.open = state.open;
  details.ontoggle = () => { state.open = details.open; save(); };
  history.scrollRestoration = "manual";
  scrollTo(0, state.scroll);
  addEventListener("pagehide", () => { state.scroll = scrollY; save(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new ResizeObserver(() => plots.forEach((u) => {
    const width = u.root.parentElement.clientWidth;
    if (width && width !== u.width) u.setSize({ width, height: 230 });
  })).observe(element("charts"));
  refresh();
})();
