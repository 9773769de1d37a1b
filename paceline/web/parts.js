// What both pages share: numbers, theme, canvas, charts. What draws a snapshot of the scheduler is in panels.js.
import { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";

export { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState };

export const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ------------------------------------------------------------------ numbers

export const whole = value => Math.round(value).toLocaleString("en");
export const percent = (value, digits = 1) => (100 * value).toFixed(digits) + " %";
export function seconds(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toFixed(value < 0.1 ? 1 : 0) + " ms";
  return value.toFixed(value < 10 ? 2 : 1) + " s";
}

/** A figure with its name. `now`: its value up to the current moment, where `value` is that of the whole run. */
export const Stat = ({ name, value, title, id, now }) => html`
  <div class="stat" title=${title}><div class="v"><span data-figure=${id}>${value}</span>
    ${now != null && html`<span class="now" title=${`${name}, up to the current moment`}>now <span data-figure=${id + "_now"}>${now}</span></span>`}</div><div class="k">${name}</div></div>`;

/** The title of a panel, and what the panel shows as a tooltip. */
export const Title = ({ name, title, children }) => html`<h2 title=${title}><b>${name}</b> ${children}</h2>`;

/** An entry of a legend: [style of its mark, text, tooltip, figure and its id]. */
export const Legend = ({ entries }) => html`<div class="legend">${entries.filter(Boolean).map(([style, text, title, figure, id]) => html`
  <span title=${title}><i style=${style}></i>${text}${id && html` <b class="num" data-figure=${id}>${whole(figure)}</b>`}</span>`)}</div>`;

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

export function useCanvas(height, draw, depends) {
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

// ------------------------------------------------------------------ host and device

/** Host and device activity around `time`; gaps in the lower lane are GPU idle time. */
export function Lanes({ lanes, time, overlap, busy }) {
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
    for (const [step, decodes, prompts, hostFrom, hostTo, deviceFrom, deviceTo, drafted, accepted] of lanes) {
      if (deviceTo < from || hostFrom > to) continue;
      pen.fillStyle = css("--host"); pen.fillRect(x(hostFrom), 6, Math.max(1, x(hostTo) - x(hostFrom) - 1), 24);
      const left = x(deviceFrom), wide = Math.max(1, x(deviceTo) - left - 1);
      pen.fillStyle = prompts ? css("--node") : css("--leaf"); pen.fillRect(left, 38, wide, 28);
      if (wide > 46) {
        pen.fillStyle = "#fff"; pen.textAlign = "center";
        pen.fillText(prompts ? `${prompts} prefill${decodes ? ` + ${decodes}` : ""}` : `${decodes} decode${decodes > 1 ? "s" : ""}${drafted ? ` ${accepted}/${drafted}` : ""}`, left + wide / 2, 52.5, wide - 6);
        pen.textAlign = "left";
      }
    }
    pen.fillStyle = css("--ink"); pen.fillRect(x(time) - .75, 0, 1.5, 72);
    pen.restore();
    pen.fillStyle = css("--soft"); pen.font = "11px system-ui, sans-serif";
    pen.fillText(seconds(from), 34, 79); pen.textAlign = "right"; pen.fillText(seconds(to), width, 79); pen.textAlign = "left";
  }, [lanes, time, span]);
  return html`<section class="card wide" data-panel="lanes"><${Title} name="Host and device" title="What CPU and GPU do around the current moment (vertical line). Gaps of the GPU are idle time. 8 decodes 20/32: of 32 drafts, 20 were accepted.">
      overlap ${overlap ? "on" : "off"}, the GPU is idle <span data-figure="idle">${percent(1 - Math.round(busy * 1000) / 1000)}</span> of the run<//>
    <div><canvas ref=${ref} role="img" aria-label="CPU and GPU activity over time"></canvas></div>
    <${Legend} entries=${[["background:var(--host)", "plan, launch, commit", "CPU: plans and launches a pass, and commits the results of an earlier one"],
      ["background:var(--node)", "prefill or mixed batch", "GPU: a pass with prompt tokens; with + n, n requests decode in it too"],
      ["background:var(--leaf)", "decode batch", "GPU: a pass in which every request gets one token"]]} /></section>`;
}

// ------------------------------------------------------------------ charts

/** Lines over time. `series`: [{name, values, colour, dash, title}], all at `times`; `mark`: a time to highlight;
    `xEnd`, `yEnd`: the ends of the axes, where they must not follow from the data. */
export function Chart({ name, title, times, series, height = 120, mark = null, xEnd = null, yEnd = 0, format = whole, xFormat = ticks => ticks.map(seconds) }) {
  const ref = useRef(null), chart = useRef(null), at = useRef(mark), ends = useRef(null);
  const theme = useTheme();
  at.current = mark;
  ends.current = { xEnd, yEnd };
  useLayoutEffect(() => {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: ref.current.clientWidth || 300, height, cursor: { show: false }, legend: { show: false }, padding: [8, 26, 0, 0], // the last label of the x-axis is centred on the end of the plot
      scales: { x: { time: false, range: (_, low, high) => [low, ends.current.xEnd ?? high] }, y: { range: (_, low, high) => [0, Math.max(high || 0, ends.current.yEnd, 1e-9) * 1.08] } },
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
  useLayoutEffect(() => { chart.current.setData([times, ...series.map(one => one.values)]); }, [times, xEnd, yEnd, ...series.map(one => one.values)]);
  useLayoutEffect(() => { chart.current.redraw(false); }, [mark]);
  return html`<div><${Title} name=${name} title=${title}>${series.map(one => html`<span title=${one.title} style=${`color:var(${one.colour});margin-right:10px`}>${one.dash ? "┄" : "—"} ${one.name}</span>`)}<//>
    <div ref=${ref}></div></div>`;
}
