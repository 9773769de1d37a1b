// Components of both pages. A component draws a snapshot of the scheduler (scheduler/snapshot.py) and is stateless.
import { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";

export { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState };

const FREE = 0, CACHED = 1, SHARED = 2, OWNED = 3; // as in scheduler/snapshot.py
const OWNERS = ["#0072b2", "#d55e00", "#009e73", "#b0578d", "#2a8fc4", "#a87400", "#6a51a3", "#8c564b", "#3f7f3f", "#c2410c"];

export const ownerColour = slot => OWNERS[slot % OWNERS.length];
export const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ------------------------------------------------------------------ numbers

export const whole = value => Math.round(value).toLocaleString("en");
export const percent = (value, digits = 1) => (100 * value).toFixed(digits) + " %";
export function seconds(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value < 0.001) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toFixed(value < 0.1 ? 1 : 0) + " ms";
  return value.toFixed(value < 10 ? 2 : 1) + " s";
}

export const Stat = ({ name, value, title, id }) => html`
  <div class="stat" title=${title}><div class="v" data-figure=${id}>${value}</div><div class="k">${name}</div></div>`;

// ------------------------------------------------------------------ theme

function currentTheme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

/** A counter that increases when colours change, so that canvases are redrawn. */
export function useTheme() {
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const again = () => setVersion(version => version + 1);
    const query = matchMedia("(prefers-color-scheme: dark)");
    query.addEventListener("change", again);
    addEventListener("themechange", again);
    return () => { query.removeEventListener("change", again); removeEventListener("themechange", again); };
  }, []);
  return version;
}

export function ThemeButton() {
  useTheme();
  const other = currentTheme() === "dark" ? "light" : "dark";
  const change = () => { document.documentElement.dataset.theme = other; dispatchEvent(new Event("themechange")); };
  return html`<button class="btn" onClick=${change} aria-label=${`${other} colours`}>${other === "dark" ? "Dark" : "Light"}</button>`;
}

// ------------------------------------------------------------------ a canvas as wide as its container

function useCanvas(height, draw, depends) {
  const ref = useRef(null);
  const [width, setWidth] = useState(0);
  const theme = useTheme();
  useLayoutEffect(() => {
    const box = ref.current.parentElement;
    const watch = new ResizeObserver(() => setWidth(Math.floor(box.clientWidth)));
    watch.observe(box);
    setWidth(Math.floor(box.clientWidth));
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (!width) return;
    const canvas = ref.current, scale = devicePixelRatio || 1;
    const tall = typeof height === "function" ? height(width) : height;
    canvas.width = width * scale; canvas.height = tall * scale;
    canvas.style.width = width + "px"; canvas.style.height = tall + "px";
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, tall);
    draw(pen, width, tall);
  }, [width, theme, ...depends]);
  return [ref, width];
}

// ------------------------------------------------------------------ pages

function decodeMap(text) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  return new Uint16Array(bytes.buffer);
}

/** For a KV cache too large to draw page by page: cells of each kind in proportion. */
function proportions(memory, cells) {
  const codes = new Uint16Array(cells);
  const counts = [[OWNED, memory.owned], [SHARED, memory.shared], [CACHED, memory.cached]];
  let at = 0;
  for (const [code, count] of counts) {
    const end = Math.min(cells, at + Math.round((count / memory.pages) * cells));
    codes.fill(code, at, end);
    at = end;
  }
  return codes;
}

function gridShape(width, count) {
  let size = 22;
  while (size > 4 && Math.ceil(count / Math.floor(width / size)) * size > 190) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.ceil(count / columns) };
}

export function Pages({ snapshot, hint = "" }) {
  const { map, memory, running } = snapshot;
  const codes = useMemo(() => (map ? decodeMap(map) : proportions(memory, 1024)), [map, memory]);
  const names = useMemo(() => new Map(running.map(one => [one.slot, one.id])), [running]);
  const [tip, setTip] = useState(null);
  const [ref, width] = useCanvas(
    width => { const { size, rows } = gridShape(width, codes.length); return rows * size; },
    (pen, width) => {
      const { size, columns } = gridShape(width, codes.length);
      const gap = size > 8 ? 2 : 1;
      const cached = css("--cached"), shared = css("--shared"), free = css("--free"), line = css("--line");
      pen.font = `600 ${Math.min(11, size - 8)}px system-ui, sans-serif`;
      pen.textAlign = "center"; pen.textBaseline = "middle";
      codes.forEach((code, index) => {
        const x = (index % columns) * size, y = Math.floor(index / columns) * size, side = size - gap;
        if (code === FREE) {
          pen.fillStyle = free; pen.fillRect(x, y, side, side);
          pen.strokeStyle = line; pen.strokeRect(x + .5, y + .5, side - 1, side - 1);
        } else if (code === CACHED) { // half a cell: in memory, but not in use
          pen.fillStyle = free; pen.fillRect(x, y, side, side);
          pen.fillStyle = cached;
          pen.beginPath(); pen.moveTo(x, y + side); pen.lineTo(x + side, y); pen.lineTo(x + side, y + side); pen.fill();
        } else if (code === SHARED) {
          pen.fillStyle = shared; pen.fillRect(x, y, side, side);
          if (size > 9) { pen.fillStyle = css("--card"); pen.beginPath(); pen.arc(x + side / 2, y + side / 2, side / 5, 0, 7); pen.fill(); }
        } else {
          pen.fillStyle = map ? ownerColour(code - OWNED) : css("--accent"); pen.fillRect(x, y, side, side);
          if (size >= 17 && map) { pen.fillStyle = "#fff"; pen.fillText(code - OWNED, x + side / 2, y + side / 2 + .5); }
        }
      });
    }, [codes]);
  const over = event => {
    const { size, columns } = gridShape(width, codes.length);
    const index = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    if (!map || index >= codes.length) return setTip(null);
    const code = codes[index];
    const what = ["free", "cached, not in use", "shared by running requests"][code] || `owned by ${names.get(code - OWNED) || "slot " + (code - OWNED)}`;
    setTip({ x: event.clientX + 12, y: event.clientY + 12, text: `page ${index}: ${what}` });
  };
  const share = name => `${whole(memory[name])}`;
  return html`<section class="card wide"><h2><b>KV cache</b> ${whole(memory.pages)} pages ${hint}</h2>
    <div><canvas ref=${ref} onMouseMove=${over} onMouseLeave=${() => setTip(null)} role="img"
      aria-label=${`pages: ${memory.owned} owned by one request, ${memory.shared} shared, ${memory.cached} cached, ${memory.free} free`}></canvas></div>
    ${tip && html`<div class="tip" style=${`left:${tip.x}px;top:${tip.y}px`}>${tip.text}</div>`}
    <div class="legend">
      <span><i style="background:var(--accent)"></i>owned by one request (number: its slot) <b class="num" data-figure="owned">${share("owned")}</b></span>
      <span><i style="background:radial-gradient(var(--card) 0 2.4px, var(--shared) 3px)"></i>shared <b class="num" data-figure="shared">${share("shared")}</b></span>
      <span><i style="background:linear-gradient(135deg,var(--free) 50%,var(--cached) 50%)"></i>cached <b class="num" data-figure="cached">${share("cached")}</b></span>
      <span><i style="background:var(--free);border-color:var(--line)"></i>free <b class="num" data-figure="free">${share("free")}</b></span>
    </div></section>`;
}

// ------------------------------------------------------------------ the prefix tree

/** Lays out the tree: x is the token position, the height of a node is its number of leaves. */
function layoutTree(nodes) {
  const laid = nodes.map(([parent, tokens, state, sharers, waiting, name], index) =>
    ({ index, parent, tokens, state, sharers, waiting, name, children: [], start: 0, leaves: 0, top: 0 }));
  for (const node of laid) if (node.parent >= 0) laid[node.parent].children.push(node);
  for (const node of laid) node.start = node.parent < 0 ? 0 : laid[node.parent].start + laid[node.parent].tokens;
  for (const node of [...laid].reverse()) node.leaves = node.children.length ? node.children.reduce((sum, child) => sum + child.leaves, 0) : 1;
  for (const node of laid) { let top = node.top; for (const child of node.children) { child.top = top; top += child.leaves; } }
  return laid;
}

export function Tree({ snapshot }) {
  const { nodes, left_out: leftOut } = snapshot.tree;
  const laid = useMemo(() => layoutTree(nodes), [nodes]);
  const box = useRef(null);
  const [width, setWidth] = useState(560);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(() => setWidth(Math.floor(box.current.clientWidth)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const drawn = laid.filter(node => node.tokens);
  const deepest = Math.max(1, ...drawn.map(node => node.start + node.tokens));
  const rows = laid.length ? laid[0].leaves : 0;
  const high = Math.max(7, Math.min(24, 260 / Math.max(1, rows)));
  const x = tokens => (tokens / deepest) * (width - 2) + 1;
  const label = node => [node.sharers > 1 && `×${node.sharers}`, node.waiting && `${node.waiting} waiting`].filter(Boolean).join(" · ");
  return html`<section class="card wide"><h2><b>Prefix tree</b> ${drawn.length} prefixes, up to ${whole(deepest)} tokens deep${leftOut ? `, ${leftOut} more not shown` : ""}</h2>
    <div ref=${box} class="tree">${drawn.length
      ? html`<svg width=${width} height=${rows * high + 2} role="img" aria-label="prefix tree">
        ${drawn.map(node => {
          const wide = Math.max(2, x(node.start + node.tokens) - x(node.start) - 1.5), tall = node.leaves * high - 1.5;
          const text = label(node);
          return html`<g key=${node.index}><title>${`${node.tokens} tokens, ${node.state}${node.sharers ? `, used by ${node.sharers} running` : ""}${node.waiting ? `, ${node.waiting} waiting` : ""}`}</title>
            <rect x=${x(node.start)} y=${node.top * high + 1} width=${wide} height=${tall} rx="3" class=${"node " + node.state}
              style=${node.state === "locked" ? `fill:var(--node);fill-opacity:${Math.min(1, .5 + .12 * node.sharers)}`
                : node.state === "cached" ? "fill:var(--cached);fill-opacity:.55" : "fill:none;stroke:var(--warm);stroke-dasharray:4 3"}></rect>
            ${text && wide > 12 + 6.4 * text.length && tall > 9 && html`<text x=${x(node.start) + 6} y=${node.top * high + 1 + tall / 2} dy=".36em" font-size=${Math.min(11, tall)}
              style=${`fill:${node.state === "locked" ? "#fff" : "var(--ink)"};font-weight:600`}>${text}</text>`}</g>`;
        })}</svg>`
      : html`<div class="empty">No cached prefixes yet.</div>`}</div>
    <div class="legend"><span><i style="background:var(--node)"></i>in use (×: number of running requests)</span>
      <span><i style="background:var(--cached)"></i>cached</span>
      <span><i style="border:1px dashed var(--warm)"></i>wanted by a waiting request</span></div></section>`;
}

// ------------------------------------------------------------------ requests

const Chip = ({ slot }) => html`<span class="chip" style=${`background:${ownerColour(slot)}`} title=${"slot " + slot}>${slot}</span>`;

export function Running({ snapshot }) {
  const { running, num_running: count } = snapshot;
  const most = Math.max(1, ...running.map(one => one.prompt + one.max));
  return html`<section class="card"><h2><b>Running</b> <span data-figure="num_running">${whole(count)}</span></h2>
    <div class="list" tabindex="0" aria-label="running requests">${running.length ? running.map(one => {
      const part = tokens => `width:${(100 * tokens) / most}%`;
      const prompt = Math.min(one.computed, one.prompt) - Math.min(one.cached, one.computed);
      return html`<div class="row" key=${one.id}><${Chip} slot=${one.slot} /><span class="id" title=${one.tenant}>${one.id}</span>
        <span class="bar" title=${`${one.cached} cached, ${one.computed} computed, ${one.output} of at most ${one.max} output tokens`}>
          <i class="b-cached" style=${part(Math.min(one.cached, one.computed))}></i><i class="b-done" style=${part(prompt)}></i><i class="b-out" style=${part(one.output)}></i></span>
        <span class="soft num">${one.phase === "prefill" ? `prompt ${one.computed}/${one.prompt}` : `${one.output}/${one.max}`}</span></div>`;
    }) : html`<div class="empty">No running requests.</div>`}
    ${count > running.length && html`<div class="empty">and ${whole(count - running.length)} more</div>`}</div>
    <div class="legend"><span><i class="bar b-cached" style="background:repeating-linear-gradient(135deg,var(--cached) 0 3px,transparent 3px 5px);border-color:var(--line)"></i>prompt cached</span>
      <span><i style="background:var(--accent)"></i>prompt computed</span><span><i style="background:var(--good)"></i>output</span></div></section>`;
}

export function Queue({ snapshot }) {
  const { waiting, num_waiting: count, reasons } = snapshot;
  const why = one => one.why.replace(/^Request \S+ waits for /, "").replace(/; \d+ other requests? waits?, policy \w+\.$/, "").replace(/\.$/, "");
  return html`<section class="card"><h2><b>Waiting</b> <span data-figure="num_waiting">${whole(count)}</span>
      ${reasons.length ? html` · ${reasons.map(([reason, number]) => `${number} for ${reason}`).join(", ")}` : ""}</h2>
    <div class="list" tabindex="0" aria-label="waiting requests">${waiting.length ? waiting.map(one => html`
      <div class="row" key=${one.id}><span class="soft">${one.retractions ? "↩" : ""}</span><span class="id" title=${one.tenant}>${one.id}</span>
        <span class="bar" title=${`${one.cached} of ${one.tokens} tokens are cached`}><i class="b-cached" style=${`width:${(100 * one.cached) / one.tokens}%`}></i></span>
        <span class="soft num">${whole(one.tokens)} tokens, ${seconds(one.waited)}</span>
        <span class="why">for ${why(one)}</span></div>`) : html`<div class="empty">No waiting requests.</div>`}
    ${count > waiting.length && html`<div class="empty">and ${whole(count - waiting.length)} more</div>`}</div></section>`;
}

// ------------------------------------------------------------------ host and device

/** Host and device activity around `time`; gaps in the lower lane are GPU idle time. */
export function Lanes({ lanes, time, overlap }) {
  const span = useMemo(() => {
    const lengths = lanes.map(lane => lane[6] - lane[5]).sort((a, b) => a - b);
    return 14 * Math.max(lengths[Math.floor(lengths.length / 2)] || 1e-3, 5e-4);
  }, [lanes]);
  const from = Math.max(0, time - span * .72), to = from + span;
  const [ref] = useCanvas(86, (pen, width) => {
    const x = at => 34 + ((at - from) / (to - from)) * (width - 36);
    pen.font = "600 11px system-ui, sans-serif"; pen.textBaseline = "middle";
    pen.fillStyle = css("--soft"); pen.fillText("CPU", 0, 18); pen.fillText("GPU", 0, 52);
    pen.fillStyle = css("--fill"); pen.fillRect(34, 6, width - 36, 24); pen.fillRect(34, 38, width - 36, 28);
    pen.save(); pen.beginPath(); pen.rect(34, 0, width - 36, 86); pen.clip();
    for (const [step, decodes, prompts, hostFrom, hostTo, deviceFrom, deviceTo] of lanes) {
      if (deviceTo < from || hostFrom > to) continue;
      pen.fillStyle = css("--host"); pen.fillRect(x(hostFrom), 6, Math.max(1, x(hostTo) - x(hostFrom) - 1), 24);
      const left = x(deviceFrom), wide = Math.max(1, x(deviceTo) - left - 1);
      pen.fillStyle = prompts ? css("--node") : css("--leaf"); pen.fillRect(left, 38, wide, 28);
      if (wide > 46) {
        pen.fillStyle = "#fff"; pen.textAlign = "center";
        pen.fillText(prompts ? `${prompts} prefill${decodes ? ` + ${decodes}` : ""}` : `${decodes} decode${decodes > 1 ? "s" : ""}`, left + wide / 2, 52.5, wide - 6);
        pen.textAlign = "left";
      }
    }
    pen.fillStyle = css("--ink"); pen.fillRect(x(time) - .75, 0, 1.5, 72);
    pen.restore();
    pen.fillStyle = css("--soft"); pen.font = "11px system-ui, sans-serif";
    pen.fillText(seconds(from), 34, 79); pen.textAlign = "right"; pen.fillText(seconds(to), width, 79); pen.textAlign = "left";
  }, [lanes, time, span]);
  const idle = useMemo(() => {
    let gaps = 0;
    for (let i = 1; i < lanes.length; i++) gaps += Math.max(0, lanes[i][5] - lanes[i - 1][6]);
    const whole = lanes.length ? lanes.at(-1)[6] - lanes[0][5] : 1;
    return gaps / whole;
  }, [lanes]);
  return html`<section class="card wide"><h2><b>Host and device</b> overlap ${overlap ? "on" : "off"}, the GPU is idle ${percent(idle)} of the run</h2>
    <div><canvas ref=${ref} role="img" aria-label="CPU and GPU activity over time"></canvas></div>
    <div class="legend"><span><i style="background:var(--host)"></i>plan, launch, commit</span><span><i style="background:var(--node)"></i>prefill or mixed batch</span>
      <span><i style="background:var(--leaf)"></i>decode batch</span></div></section>`;
}

// ------------------------------------------------------------------ charts

/** Lines over time. `series`: [{name, values, colour, dash}], all at `times`; `mark`: a time to highlight. */
export function Chart({ title, times, series, height = 120, mark = null, format = whole, xFormat = ticks => ticks.map(seconds) }) {
  const ref = useRef(null), chart = useRef(null), at = useRef(mark);
  const theme = useTheme();
  at.current = mark;
  useLayoutEffect(() => {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: ref.current.clientWidth || 300, height, cursor: { show: false }, legend: { show: false }, padding: [8, 8, 0, 0],
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high || 0, 1e-9) * 1.08] } },
      axes: [{ ...axis, size: 24, values: (_, ticks) => xFormat(ticks), space: 70 }, { ...axis, size: 54, values: (_, ticks) => ticks.map(format), space: 28 }],
      series: [{}, ...series.map(({ colour, dash }) => ({ stroke: css(colour) || colour, width: 1.6, dash, points: { show: false } }))],
      hooks: { draw: [plot => {
        if (at.current == null) return;
        const x = plot.valToPos(at.current, "x", true);
        plot.ctx.fillStyle = css("--ink"); plot.ctx.fillRect(x - 1, plot.bbox.top, 2, plot.bbox.height);
      }] },
    };
    chart.current = new uPlot(options, [times, ...series.map(one => one.values)], ref.current);
    const watch = new ResizeObserver(() => chart.current.setSize({ width: ref.current.clientWidth, height }));
    watch.observe(ref.current);
    return () => { watch.disconnect(); chart.current.destroy(); };
  }, [theme, series.length]);
  useLayoutEffect(() => { chart.current.setData([times, ...series.map(one => one.values)]); }, [times, ...series.map(one => one.values)]);
  useLayoutEffect(() => { chart.current.redraw(false); }, [mark]);
  return html`<div><h2><b>${title}</b> ${series.map(one => html`<span style=${`color:${one.colour.startsWith("--") ? `var(${one.colour})` : one.colour};margin-right:10px`}>${one.dash ? "┄" : "—"} ${one.name}</span>`)}</h2>
    <div ref=${ref}></div></div>`;
}
