// The simulator page: plays a simulation frame by frame. The link holds the whole view: parameters, policies and time.
import { Pages, Queue, Running, Tree } from "./panels.js";
import { Chart, html, Lanes, percent, render, seconds, Stat, ThemeButton, useEffect, useMemo, useRef, useState, whole } from "./parts.js";

const WAITS = ["0", "0.005", "0.02", "0.05", "0.2", "1", "5", "inf"];
const PAGE_SIZES = ["1", "2", "4", "8", "16", "32", "64"];
const waitName = text => (text === "inf" ? "∞: cache hits only" : text === "0" ? "0: FCFS" : seconds(Number(text)));

// Parameters of the side panel: [name, label, kind, ...]. Help texts, choices and defaults come from /api/options.
const FIELDS = {
  "Workload": [
    ["workload", "Kind", "choice"], ["arrivals", "Arrivals", "choice"],
    ["rate", "Requests per second", "range", 10, 1000, 10], ["requests", "Requests", "range", 8, 200, 4],
    ["shared", "Shared prefix", "range", 0, .95, .05, percent], ["groups", "Prefix groups", "range", 1, 16, 1],
    ["prompt_tokens", "Prompt tokens", "range", 32, 1024, 32], ["output_tokens", "Output tokens", "range", 4, 128, 4],
    ["tenants", "Tenants", "range", 1, 6, 1], ["seed", "Seed", "range", 0, 50, 1],
  ],
  "Engine": [
    ["gpu", "Model and GPU", "choice"], ["num_pages", "KV cache pages", "range", 32, 512, 8], ["page_size", "Page size, tokens", "steps", PAGE_SIZES, text => text],
    ["max_running", "Max running", "range", 1, 32, 1], ["overlap", "Overlap", "check"],
  ],
  "Scheduler": [["max_wait", "Max wait", "steps", WAITS, waitName], ["chunk_tokens", "Chunk tokens", "range", 16, 1024, 16], ["batching", "Batching", "choice"], ["eviction", "Eviction", "choice"]],
};

// ------------------------------------------------------------------ the link

function readLink() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const { at = "0", policy = "fcfs", against = "fair", ...asked } = found;
  return { at: Number(at) || 0, policies: against === "none" ? [policy] : [policy, against], asked };
}

function writeLink({ at, policies, asked }) {
  const text = new URLSearchParams({ policy: policies[0], against: policies[1] || "none", ...asked, at: at.toFixed(6) });
  history.replaceState(null, "", "#" + text);
}

// ------------------------------------------------------------------ runs

async function fetchRun(policy, asked) {
  const response = await fetch("/api/run?" + new URLSearchParams({ ...asked, policy }));
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

function useRuns(policies, asked) {
  const [state, setState] = useState({ runs: null, error: null, busy: true });
  const newest = useRef(0);
  useEffect(() => {
    const ticket = ++newest.current;
    setState(before => ({ ...before, busy: true }));
    const timer = setTimeout(async () => { // debounced: a moving slider sends one request
      try {
        const runs = await Promise.all(policies.map(policy => fetchRun(policy, asked)));
        if (ticket === newest.current) setState({ runs, error: null, busy: false });
      } catch (error) {
        if (ticket === newest.current) setState(before => ({ ...before, error: error.message, busy: false }));
      }
    }, 120);
    return () => clearTimeout(timer);
  }, [policies.join(), JSON.stringify(asked)]);
  return state;
}

// ------------------------------------------------------------------ the side panel

function Field({ spec, option, value, onChange }) {
  const [name, label, kind, ...more] = spec;
  const id = "field-" + name;
  const title = option.help, about = option.choice_help;
  if (kind === "choice") return html`<div class=${"field" + (name === "gpu" ? " tall" : "")}><label for=${id} title=${title}>${label}</label>
    <select id=${id} value=${value} title=${about[value]} onChange=${event => onChange(name, event.target.value)}>${option.choices.map(choice => html`<option value=${choice} title=${about[choice]} selected=${choice === value}>${choice}</option>`)}</select></div>`;
  if (kind === "check") return html`<div class="field"><label for=${id} title=${title}>${label}</label>
    <input id=${id} type="checkbox" checked=${value === "true"} onChange=${event => onChange(name, String(event.target.checked))} /></div>`;
  const [low, high, step, format] = kind === "steps" ? [0, more[0].length - 1, 1] : more;
  const shown = kind === "steps" ? more[1](value) : format ? format(Number(value), 0) : whole(Number(value));
  const position = kind === "steps" ? Math.max(0, more[0].indexOf(value)) : value;
  const change = event => onChange(name, kind === "steps" ? more[0][event.target.value] : event.target.value);
  return html`<div class="field"><label for=${id} title=${title}>${label}</label><output for=${id}>${shown}</output>
    <input id=${id} type="range" min=${low} max=${high} step=${step} value=${position} onInput=${change} aria-valuetext=${shown} /></div>`;
}

function Side({ options, asked, policies, onAsk, onPolicies }) {
  const valueOf = name => asked[name] ?? String(options[name].default);
  const set = (name, value) => {
    const { [name]: _, ...others } = asked;
    onAsk(value === String(options[name].default) ? others : { ...others, [name]: value });
  };
  const choose = (index, value) => onPolicies(index ? (value === "none" ? [policies[0]] : [policies[0], value]) : [value, ...policies.slice(1)]);
  return html`<form class="side" aria-label="parameters" onSubmit=${event => event.preventDefault()}>
    <fieldset><legend>Policies</legend>
      ${["Left", "Right"].map((label, index) => html`<div class="field"><label for=${"policy-" + index} title=${options.policy.help}>${label}</label>
        <select id=${"policy-" + index} value=${policies[index] || "none"} title=${options.policy.choice_help[policies[index]]} onChange=${event => choose(index, event.target.value)}>
          ${[...(index ? ["none"] : []), ...options.policy.choices].map(choice => html`<option value=${choice} title=${options.policy.choice_help[choice]} selected=${choice === (policies[index] || "none")}>${choice}</option>`)}</select></div>`)}
    </fieldset>
    ${Object.entries(FIELDS).map(([legend, fields]) => html`<fieldset><legend>${legend}</legend>
      ${fields.map(spec => html`<${Field} key=${spec[0]} spec=${spec} option=${options[spec[0]]} value=${valueOf(spec[0])} onChange=${set} />`)}</fieldset>`)}
  </form>`;
}

// ------------------------------------------------------------------ one run

function Journal({ run, frame }) {
  const recent = useMemo(() => {
    let end = 0;
    while (end < run.events.length && run.events[end][0] <= frame) end++;
    return run.events.slice(Math.max(0, end - 40), end).reverse();
  }, [run, frame]);
  return html`<section class="card wide"><h2><b>Journal</b> scheduling decisions and their reasons, newest first</h2>
    <div class="journal" tabindex="0" aria-label="journal">${recent.length ? recent.map(([at, time, kind, request, text]) => html`
      <div class=${at === frame ? "now" : "past"} data-kind=${kind}><span class="num">${seconds(time)}</span><b>${request || "—"}</b><span>${text}</span></div>`)
      : html`<div class="empty">No decisions yet.</div>`}</div></section>`;
}

function Column({ run, time, overlap, index, about }) {
  const frame = frameAt(run, time), snapshot = run.frames[frame];
  const { summary } = run;
  const times = useMemo(() => run.frames.map(one => one.time), [run]);
  const waiting = useMemo(() => run.frames.map(one => one.num_waiting), [run]);
  const running = useMemo(() => run.frames.map(one => one.num_running), [run]);
  return html`<div class="run" data-side=${index}>
    <div class="side-name" title=${about}>${run.policy} <span class="soft" style="font-size:13px;font-weight:400">pass ${frame + 1} of ${run.frames.length}${run.cut ? " (truncated)" : ""}</span></div>
      <section class="card wide"><div class="stats">
        <${Stat} id="hit_rate" name="prefix cache hit rate" value=${percent(summary.hit_rate, 2)} title="share of prompt tokens found in the prefix cache" />
        <${Stat} id="ttft_p50_ms" name="TTFT p50" value=${seconds(summary.ttft_p50_ms / 1e3)} />
        <${Stat} id="ttft_p99_ms" name="TTFT p99" value=${seconds(summary.ttft_p99_ms / 1e3)} />
        <${Stat} id="wait_p99_ms" name="waiting time p99" value=${seconds(summary.wait_p99_ms / 1e3)} />
        <${Stat} id="tokens_per_s" name="output tokens/s" value=${whole(summary.tokens_per_s)} />
        <${Stat} id="busy" name="GPU utilization" value=${percent(summary.busy)} />
        <${Stat} id="retractions" name="retractions" value=${whole(summary.retractions)} />
        <${Stat} id="seconds" name="total time" value=${seconds(summary.seconds)} />
      </div></section>
      <section class="card wide"><${Chart} name="Requests" times=${times} mark=${time}
        series=${[{ name: "running", values: running, colour: "--accent" }, { name: "waiting", values: waiting, colour: "--warm", dash: [5, 4] }]} /></section>
      <${Queue} snapshot=${snapshot} /><${Running} snapshot=${snapshot} />
      <${Pages} snapshot=${snapshot} hint=${`of ${run.page_size} token${run.page_size > 1 ? "s" : ""}`} />
      <${Tree} snapshot=${snapshot} />
      <${Lanes} lanes=${run.lanes} time=${time} overlap=${overlap} busy=${summary.busy} />
      <${Journal} run=${run} frame=${frame} /></div>`;
}

// ------------------------------------------------------------------ the page

function App({ options }) {
  const [view, setView] = useState(readLink);
  const [playing, setPlaying] = useState(false);
  const [speed, setSpeed] = useState(.05);
  const { runs, error, busy } = useRuns(view.policies, view.asked);
  const end = runs ? Math.max(...runs.map(run => run.frames.at(-1)?.time || 0)) : 0;
  const time = Math.min(view.at, end);
  const update = change => setView(before => ({ ...before, ...change }));
  useEffect(() => { if (!playing) writeLink(view); }, [view, playing]);
  useEffect(() => {
    const follow = () => setView(readLink());
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
      if (event.target.matches("input, select, [tabindex='0']") && event.key !== " ") return;
      if (event.target.matches("button, input[type=checkbox], select") && event.key === " ") return;
      const actions = { " ": play, ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => update({ at: 0 }), End: () => update({ at: end }) };
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
        <button class="btn" onClick=${copy}>Copy link</button><${ThemeButton} /></span></header>
    <div class="sim"><${Side} options=${options} asked=${view.asked} policies=${view.policies} onAsk=${asked => update({ asked })} onPolicies=${policies => update({ policies })} />
      <main class="stage">${error && html`<div class="error" role="alert">${error}</div>`}
        ${runs && html`<div class=${"pair" + (runs.length > 1 ? " two" : "")}>${runs.map((run, index) => run.frames.length
          ? html`<${Column} key=${index} index=${index} about=${options.policy.choice_help[run.policy]} run=${run} time=${time} overlap=${(view.asked.overlap ?? "true") === "true"} />`
          : html`<div class="empty">No request could run: all were refused.</div>`)}</div>`}</main></div>
    <div class="transport" role="group" aria-label="playback">
      <button class="btn" onClick=${() => step(-1)} aria-label="previous pass" title="previous pass (←)">◀</button>
      <button class="btn main" onClick=${play} title="play or pause (space)">${playing ? "Pause" : "Play"}</button>
      <button class="btn" onClick=${() => step(1)} aria-label="next pass" title="next pass (→)">▶</button>
      <input type="range" aria-label="time" min="0" max=${end || 1} step="any" value=${time} onInput=${event => { setPlaying(false); update({ at: Number(event.target.value) }); }} />
      <label class="soft">speed <select value=${speed} onChange=${event => setSpeed(Number(event.target.value))} aria-label="speed">
        ${[.005, .02, .05, .2, 1].map(value => html`<option value=${value} selected=${value === speed}>${value < 1 ? `1/${Math.round(1 / value)}` : "real time"}</option>`)}</select></label>
      <span class="when" data-figure="time">${seconds(time)} of ${seconds(end)}</span></div>`;
}

const options = await (await fetch("/api/options")).json();
render(html`<${App} options=${options} />`, document.body);
