// The simulator page: plays simulations frame by frame. The link holds the whole view: parameters, columns, time and the
// highlighted state.
import { Host, Pages, Queue, Running, Tenants, Tree } from "./panels.js";
import { Chart, html, Lanes, percent, render, seconds, Stat, ThemeButton, Title, useEffect, useMemo, useRef, useState, whole } from "./parts.js";
import { STATES, States } from "./states.js";

const WAITS = ["0", "0.005", "0.02", "0.05", "0.2", "1", "5", "inf"];
const DRAFTS = ["0", "1", "2", "3", "4", "5", "6", "7"];
const PAGE_SIZES = ["1", "2", "4", "8", "16", "32", "64"];
const waitName = text => (text === "inf" ? "∞: cache hits only" : text === "0" ? "0: FCFS" : seconds(Number(text)));

// Parameters of the side panel: [name, label, kind, ...]. Help texts, choices and defaults come from /api/options.
const FIELDS = {
  "Workload": [
    ["workload", "Kind", "choice"], ["arrivals", "Arrivals", "choice"],
    ["rate", "Requests per second", "range", 10, 1000, 10], ["requests", "Requests", "range", 8, 200, 4],
    ["shared", "Shared prefix", "range", 0, .95, .05, percent], ["groups", "Prefix groups", "range", 1, 16, 1],
    ["prompt_tokens", "Prompt tokens", "range", 32, 1024, 32], ["output_tokens", "Output tokens", "range", 4, 128, 4],
    ["tenants", "Tenants", "range", { tenants: 2, other: 1 }, 6, 1], ["seed", "Seed", "range", 0, 50, 1],
  ],
  "Engine": [
    ["gpu", "Model and GPU", "choice"], ["num_pages", "KV cache pages", "range", 32, 512, 8], ["page_size", "Page size, tokens", "steps", PAGE_SIZES, text => text],
    ["max_running", "Max running", "range", 1, 32, 1], ["num_host_pages", "Host memory pages", "range", 0, 1024, 16],
  ],
  "Speculative decoding": [["drafts", "Drafts per row", "steps", DRAFTS, text => (text === "0" ? "off" : text)], ["acceptance", "Acceptance", "range", 0, 1, .05, percent]],
  "Scheduler": [["max_wait", "Max wait", "steps", WAITS, waitName], ["chunk_tokens", "Chunk tokens", "range", 16, 1024, 16], ["eviction", "Eviction", "choice"]],
};
// What each column has of its own
const OWN = { policy: "Policy", batching: "Batching", overlap: "Overlap" };
const SIDES = ["Left", "Right"];

// ------------------------------------------------------------------ the link

/** The right column has what the left has, unless `against…` says otherwise. */
function readLink(options) {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const { at = "0", state, policy = "fcfs", batching = String(options.batching.default), overlap = String(options.overlap.default), against = "fair", against_batching = batching, against_overlap = overlap, ...asked } = found;
  const columns = [{ policy, batching, overlap }, { policy: against, batching: against_batching, overlap: against_overlap }];
  return { at: Number(at) || 0, lit: STATES.includes(state) ? state : null, columns: against === "none" ? columns.slice(0, 1) : columns, asked };
}

function writeLink({ at, lit, columns: [left, right], asked }) {
  // Rounded up: a little before the time of a frame, the frame before it would be shown.
  const found = { ...left, against: right?.policy ?? "none", ...asked, at: (Math.ceil(at * 1e6) / 1e6).toFixed(6) };
  for (const name of ["batching", "overlap"]) if (right && right[name] !== left[name]) found["against_" + name] = right[name];
  if (lit) found.state = lit;
  history.replaceState(null, "", "#" + new URLSearchParams(found));
}

// ------------------------------------------------------------------ runs

async function fetchRun(parameters) {
  const response = await fetch("/api/run?" + new URLSearchParams(parameters));
  const body = await response.json();
  if (!response.ok) throw new Error(body.error);
  return body;
}

/** The index of the last frame at or before `time`. */
function frameAt(run, time) {
  let low = 0, high = run.frames.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (run.frames[middle].time <= time + 1e-12) low = middle; else high = middle - 1;
  }
  return low;
}

/** One run per column, of the same arrivals. */
function useRuns(columns, asked) {
  const [state, setState] = useState({ runs: null, error: null, busy: true });
  const newest = useRef(0);
  useEffect(() => {
    const ticket = ++newest.current;
    setState(before => ({ ...before, busy: true }));
    const timer = setTimeout(async () => { // debounced: a moving slider sends one request
      try {
        const runs = await Promise.all(columns.map(own => fetchRun({ ...asked, ...own })));
        if (ticket === newest.current) setState({ runs, error: null, busy: false });
      } catch (error) {
        if (ticket === newest.current) setState(before => ({ ...before, error: error.message, busy: false }));
      }
    }, 120);
    return () => clearTimeout(timer);
  }, [JSON.stringify([columns, asked])]);
  return state;
}

// ------------------------------------------------------------------ the side panel

const defaultOf = (options, name, workload) => String(options[name].default_of[workload] ?? options[name].default);

function Field({ spec, option, value, workload, onChange }) {
  const [name, label, kind, ...more] = spec;
  const id = "field-" + name;
  const title = option.help, about = option.choice_help;
  if (kind === "choice") return html`<div class=${"field" + (name === "gpu" ? " tall" : "")}><label for=${id} title=${title}>${label}</label>
    <select id=${id} value=${value} title=${about[value] ?? title} onChange=${event => onChange(name, event.target.value)}>${option.choices.map(choice => html`<option value=${choice} title=${about[choice]} selected=${choice === value}>${choice}</option>`)}</select></div>`;
  const [lowest, high, step, format] = kind === "steps" ? [0, more[0].length - 1, 1] : more;
  const low = lowest[workload] ?? lowest.other ?? lowest;
  const shown = kind === "steps" ? more[1](value) : format ? format(Number(value), 0) : whole(Number(value));
  const position = kind === "steps" ? Math.max(0, more[0].indexOf(value)) : value;
  const change = event => onChange(name, kind === "steps" ? more[0][event.target.value] : event.target.value);
  return html`<div class="field"><label for=${id} title=${title}>${label}</label><output for=${id}>${shown}</output>
    <input id=${id} type="range" min=${low} max=${high} step=${step} value=${position} onInput=${change} aria-valuetext=${shown} /></div>`;
}

/** Policy, batching and overlap of both columns. */
function Columns({ options, columns, onColumns }) {
  const choose = (side, name, value) => {
    if (side && name === "policy" && value === "none") return onColumns(columns.slice(0, 1));
    const left = columns[0], all = [left, columns[1] ?? { ...left }];
    onColumns(all.map((own, index) => (index === side ? { ...own, [name]: value } : own)).slice(0, side ? 2 : columns.length));
  };
  return html`<fieldset><legend title="Both columns serve the same arrivals.">Columns</legend><div class="columns">
    <span></span>${SIDES.map(side => html`<span class="soft" title=${`${side.toLowerCase()} column`}>${side}</span>`)}
    ${Object.entries(OWN).map(([name, label]) => html`<label title=${options[name].help}>${label}</label>${SIDES.map((side, index) => {
      const value = (columns[index] ?? columns[0])[name], aria = `${side} ${name}`;
      if (name === "overlap") return html`<input type="checkbox" aria-label=${aria} title=${options[name].help} disabled=${!columns[index]} checked=${value === "true"} onChange=${event => choose(index, name, String(event.target.checked))} />`;
      const shown = name === "policy" && !columns[index] ? "none" : value;
      return html`<select aria-label=${aria} value=${shown} title=${options[name].choice_help[shown] ?? "no second column"} disabled=${name !== "policy" && !columns[index]} onChange=${event => choose(index, name, event.target.value)}>
        ${[...(index && name === "policy" ? ["none"] : []), ...options[name].choices].map(choice => html`<option value=${choice} title=${options[name].choice_help[choice]} selected=${choice === shown}>${choice}</option>`)}</select>`;
    })}`)}</div></fieldset>`;
}

function Side({ options, asked, columns, onAsk, onColumns }) {
  const workload = asked.workload ?? options.workload.default;
  const set = (name, value) => {
    const { [name]: _, ...others } = asked;
    onAsk(value === defaultOf(options, name, workload) ? others : { ...others, [name]: value });
  };
  return html`<form class="side" aria-label="parameters" onSubmit=${event => event.preventDefault()}>
    <${Columns} options=${options} columns=${columns} onColumns=${onColumns} />
    ${Object.entries(FIELDS).map(([legend, fields]) => html`<fieldset><legend title="of both columns">${legend}</legend>
      ${fields.map(spec => html`<${Field} key=${spec[0]} spec=${spec} option=${options[spec[0]]} workload=${workload} value=${asked[spec[0]] ?? defaultOf(options, spec[0], workload)} onChange=${set} />`)}</fieldset>`)}
  </form>`;
}

// ------------------------------------------------------------------ one run

function Journal({ run, frame }) {
  const recent = useMemo(() => {
    let end = 0;
    while (end < run.events.length && run.events[end][0] <= frame) end++;
    return run.events.slice(Math.max(0, end - 40), end).reverse();
  }, [run, frame]);
  return html`<section class="card wide" data-panel="journal"><${Title} name="Journal" title="Every decision of the scheduler with its time and reason. Those since the previous pass are in black.">scheduling decisions and their reasons, newest first<//>
    <div class="journal" tabindex="0" aria-label="journal">${recent.length ? recent.map(([at, time, kind, request, text]) => html`
      <div class=${at === frame ? "now" : "past"} data-kind=${kind} data-time=${time} data-frame=${at}><span class="num">${seconds(time)}</span><b>${request || "—"}</b><span>${text}</span></div>`)
      : html`<div class="empty">No decisions yet.</div>`}</div></section>`;
}

function Figures({ summary, snapshot: { counters, phases } }) {
  const rate = counters.prompt_tokens ? counters.hit_tokens / counters.prompt_tokens : 0;
  return html`<section class="card wide" data-panel="figures"><${Title} name="Whole run" title="Figures of the whole run; those marked 'now' count up to the current moment.">and up to this moment<//><div class="stats">
    <${Stat} id="finished" name="finished requests" value=${whole(summary.finished)} now=${whole(phases.finished)} title="requests that have got all their tokens" />
    <${Stat} id="requests_per_s" name="requests/s" value=${summary.requests_per_s.toFixed(1)} title="finished requests per second of the run" />
    <${Stat} id="tokens_per_s" name="output tokens/s" value=${whole(summary.tokens_per_s)} title="output tokens per second of the run" />
    <${Stat} id="hit_rate" name="prefix cache hit rate" value=${percent(summary.hit_rate, 2)} now=${percent(rate, 2)} title="share of prompt tokens found in the prefix cache, of admitted requests" />
    <${Stat} id="wait_mean_ms" name="waiting time mean" value=${seconds(summary.wait_mean_ms / 1e3)} title="mean time from arrival to first admission" />
    <${Stat} id="wait_p99_ms" name="waiting time p99" value=${seconds(summary.wait_p99_ms / 1e3)} title="99 of 100 requests are admitted within this time" />
    <${Stat} id="ttft_p50_ms" name="TTFT p50" value=${seconds(summary.ttft_p50_ms / 1e3)} title="time to first token, from arrival: median" />
    <${Stat} id="ttft_p99_ms" name="TTFT p99" value=${seconds(summary.ttft_p99_ms / 1e3)} title="time to first token, from arrival: of 99 in 100 requests at most" />
    <${Stat} id="busy" name="GPU utilization" value=${percent(summary.busy)} title="share of the run in which the GPU computes" />
    <${Stat} id="retractions" name="retractions" value=${whole(summary.retractions)} now=${whole(counters.retractions)} title="running requests that gave their memory back and were computed again" />
    ${summary.drafted_tokens !== undefined && html`<${Stat} id="accepted" name="accepted drafts" value=${percent(summary.accepted_tokens / Math.max(1, summary.drafted_tokens))} now=${percent(counters.accepted_tokens / Math.max(1, counters.drafted_tokens))} title=${`share of the drafts that were verified: ${whole(summary.accepted_tokens)} of ${whole(summary.drafted_tokens)} in the whole run`} />
    <${Stat} id="tokens_per_decode" name="tokens per row" value=${summary.tokens_per_decode.toFixed(2)} title="output tokens of a decode row in a forward pass: one, and the accepted drafts" />`}
    <${Stat} id="seconds" name="total time" value=${seconds(summary.seconds)} title="simulated time until the last token" />
    ${summary.refused > 0 && html`<${Stat} id="refused" name="refused" value=${whole(summary.refused)} now=${whole(counters.refused)} title="requests that can never run, for example because they need more pages than there are" />`}
  </div></section>`;
}

function Column({ run, time, index, about, ends, lit, onLit }) {
  const frame = frameAt(run, time), snapshot = run.frames[frame];
  const times = useMemo(() => run.frames.map(one => one.time), [run]);
  const waiting = useMemo(() => run.frames.map(one => one.num_waiting), [run]);
  const running = useMemo(() => run.frames.map(one => one.num_running), [run]);
  const finishedIds = useMemo(() => run.events.filter(([at, , kind]) => kind === "finish" && at <= frame).map(event => event[3]), [run, frame]);
  const panels = [
    html`<div class="side-name" title=${about}>${run.policy} <span class="soft">${run.batching} batching, overlap ${run.overlap ? "on" : "off"}</span>
      <span class="soft end" title=${`passes that are finished at this moment, of all${run.cut ? "; the run goes on after those shown here" : ""}`}>pass ${frame} of ${run.frames.length - 1}${run.cut ? " (truncated)" : ""}</span></div>`,
    html`<${Figures} summary=${run.summary} snapshot=${snapshot} />`,
    html`<section class="card wide" data-panel="chart"><${Chart} name="Requests" title="Running and waiting requests over time. The line is the current moment. Both columns have the same axes." times=${times} mark=${time} xEnd=${ends.time} yEnd=${ends.requests}
      series=${[{ name: "running", values: running, colour: "--accent", title: "requests with a slot" }, { name: "waiting", values: waiting, colour: "--warm", dash: [5, 4], title: "requests in the queue" }]} /></section>`,
    html`<${States} run=${run} snapshot=${snapshot} finishedIds=${finishedIds} lit=${lit} onLit=${onLit} />`,
    snapshot.tenants.length > 1 && html`<${Tenants} tenants=${snapshot.tenants} />`,
    html`<${Queue} snapshot=${snapshot} lit=${lit} />`, html`<${Running} snapshot=${snapshot} lit=${lit} />`,
    html`<${Pages} snapshot=${snapshot} lit=${lit} hint=${`of ${run.page_size} token${run.page_size > 1 ? "s" : ""}`} />`,
    snapshot.host && html`<${Host} snapshot=${snapshot} />`,
    run.prefix_cache && html`<${Tree} snapshot=${snapshot} />`,
    html`<${Lanes} lanes=${run.lanes} time=${time} overlap=${run.overlap} busy=${run.summary.busy} />`,
    html`<${Journal} run=${run} frame=${frame} />`,
  ].filter(Boolean);
  // Both columns have the same panels in the same rows of one grid, so a panel is as high as its counterpart.
  return html`<div class="run" data-side=${index} style=${`--panels:${panels.length}`}>${panels}</div>`;
}

// ------------------------------------------------------------------ the page

function App({ options }) {
  const [view, setView] = useState(() => readLink(options));
  const [playing, setPlaying] = useState(false);
  const [speed, setSpeed] = useState(.05);
  const { runs, error, busy } = useRuns(view.columns, view.asked);
  const end = runs ? Math.max(...runs.map(run => run.frames.at(-1)?.time || 0)) : 0;
  const time = Math.min(view.at, end);
  const ends = useMemo(() => ({ time: end, requests: Math.max(1, ...(runs ?? []).flatMap(run => run.frames.map(one => Math.max(one.num_waiting, one.num_running)))) }), [runs]);
  const update = change => setView(before => ({ ...before, ...change }));
  useEffect(() => { if (!playing) writeLink(view); }, [view, playing]);
  useEffect(() => {
    const follow = () => setView(readLink(options));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);

  const step = direction => {
    if (!runs) return;
    setPlaying(false);
    const moments = runs.flatMap(run => run.frames.map(frame => frame.time));
    const next = direction > 0 ? Math.min(...moments.filter(moment => moment > time + 1e-12)) : Math.max(...moments.filter(moment => moment < time - 1e-12));
    if (Number.isFinite(next)) update({ at: next });
  };
  useEffect(() => {
    if (!playing || !runs) return undefined;
    let last = performance.now(), handle;
    const tick = now => {
      const passed = ((now - last) / 1e3) * speed;
      last = now;
      setView(before => ({ ...before, at: Math.min(end, before.at + passed) }));
      handle = requestAnimationFrame(tick);
    };
    handle = requestAnimationFrame(tick);
    return () => cancelAnimationFrame(handle);
  }, [playing, runs, speed, end]);
  useEffect(() => { if (playing && end && view.at >= end) setPlaying(false); }, [playing, view.at, end]);
  const play = () => { if (!playing && view.at >= end) update({ at: 0 }); setPlaying(!playing); };
  useEffect(() => {
    const key = event => {
      if (event.target.matches("input, select, [tabindex='0']:not([role=button])") && event.key !== " ") return;
      if (event.target.matches("button, summary, [role=button], input[type=checkbox], select") && event.key === " ") return;
      const actions = { Escape: () => update({ lit: null }), " ": play, ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => update({ at: 0 }), End: () => update({ at: end }) };
      if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  });
  const copy = () => { writeLink(view); navigator.clipboard?.writeText(location.href); };
  return html`
    <header class="top"><img class="mark" src="/mark.svg" alt="" /><h1>Paceline simulator</h1>
      <span class="sub">the real scheduler on a virtual GPU</span>
      <span class="end"><span class="soft" role="status" data-busy=${String(busy)}>${busy ? "running…" : ""}</span>
        <button class="btn" title="copy a link to this view: parameters, columns, moment and highlighted state" onClick=${copy}>Copy link</button><${ThemeButton} /></span></header>
    <div class="sim"><${Side} options=${options} asked=${view.asked} columns=${view.columns} onAsk=${asked => update({ asked })} onColumns=${columns => update({ columns })} />
      <main class="stage">${error && html`<div class="error" role="alert">${error}</div>`}
        ${runs && html`<div class=${"pair" + (runs.length > 1 ? " two" : "")}>${runs.map((run, index) => run.frames.length > 1
          ? html`<${Column} key=${index} index=${index} about=${options.policy.choice_help[run.policy]} run=${run} time=${time} ends=${ends} lit=${view.lit} onLit=${lit => update({ lit })} />`
          : html`<div class="empty">No request could run: all were refused.</div>`)}</div>`}</main></div>
    <div class="transport" role="group" aria-label="playback">
      <button class="btn" onClick=${() => step(-1)} aria-label="previous pass" title="previous pass (←)">◀</button>
      <button class="btn main" onClick=${play} title="play or pause (space)">${playing ? "Pause" : "Play"}</button>
      <button class="btn" onClick=${() => step(1)} aria-label="next pass" title="next pass (→)">▶</button>
      <input type="range" aria-label="time" min="0" max=${end || 1} step="any" value=${time} onInput=${event => { setPlaying(false); update({ at: Number(event.target.value) }); }} />
      <label class="soft" title="simulated seconds per second">speed <select value=${speed} onChange=${event => setSpeed(Number(event.target.value))} aria-label="speed">
        ${[.005, .02, .05, .2, 1].map(value => html`<option value=${value} selected=${value === speed}>${value < 1 ? `1/${Math.round(1 / value)}` : "real time"}</option>`)}</select></label>
      <span class="when" title="the current moment, of the longer run" data-figure="time">${seconds(time)} of ${seconds(end)}</span></div>`;
}

const options = await (await fetch("/api/options")).json();
render(html`<${App} options=${options} />`, document.body);
