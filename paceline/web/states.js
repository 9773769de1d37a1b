// The states of a request as a drawing. A click on a state highlights its requests, and says what happens in it.
import { html, Title, whole } from "./parts.js";

export const STATES = ["waiting", "prefill", "decoding", "finished"];

const TEXTS = {
  waiting: run => `In the queue. When a pass is planned, policy ${run.policy} selects a request; it is admitted to prefill if a slot is free, and the tokens of the pass and the KV cache suffice.${run.batching === "static" ? " Batching is static: none is admitted before the whole batch has finished." : ""}`,
  prefill: run => `Has a slot. Each pass computes up to ${whole(run.chunk_tokens)} tokens of its prompt, after the part that is cached. The pass with the last of them samples the first output token: then it is decoding.`,
  decoding: () => "Each pass computes its last token and samples the next one. It finishes with a stop token or max_tokens. If the KV cache is full, it is retracted: slot and pages are released, its tokens are kept, and it waits again, before new requests.",
  finished: () => "All its tokens are known, and its slot is free. Its pages stay in the prefix cache until they are evicted, so that a later request with the same prefix need not compute it.",
};
const ARROWS = [["admit", "The scheduler admits a request when it plans a pass."], ["sample", "The pass that computes the end of the prompt samples the first token."], ["end", "A stop token or max_tokens; an abort or a deadline ends a request in any state."]];
const WIDE = 98, HIGH = 46, TOP = 4, STEP = 152; // of a box and between two

function Box({ name, index, count, lit, onLit }) {
  const toggle = () => onLit(lit === name ? null : name);
  const key = event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } };
  return html`<g class=${"state" + (lit === name ? " lit" : "")} role="button" tabindex="0" aria-pressed=${String(lit === name)} data-state=${name}
      aria-label=${`${name}: ${count} ${count === 1 ? "request" : "requests"}`} onClick=${toggle} onKeyDown=${key}>
    <title>${`highlight the requests that are ${name === "prefill" ? "in prefill" : name}`}</title>
    <rect x=${2 + index * STEP} y=${TOP} width=${WIDE} height=${HIGH} rx="8"></rect>
    <text class="k" x=${2 + index * STEP + WIDE / 2} y=${TOP + 17}>${name}</text>
    <text class="v" x=${2 + index * STEP + WIDE / 2} y=${TOP + 36} data-figure=${"state_" + name}>${whole(count)}</text></g>`;
}

/** `finishedIds`: requests that have finished by now, oldest first; the snapshot has only their number. */
export function States({ run, snapshot, finishedIds, lit, onLit }) {
  const { phases, counters } = snapshot;
  const ids = { waiting: snapshot.waiting.map(one => one.id), finished: finishedIds };
  for (const phase of ["prefill", "decoding"]) ids[phase] = snapshot.running.filter(one => one.phase === phase).map(one => one.id);
  const middle = TOP + HIGH / 2, bottom = TOP + HIGH, low = bottom + 20;
  const centre = index => 2 + index * STEP + WIDE / 2;
  return html`<section class="card wide" data-panel="states"><${Title} name="States of a request" title="Each request is in one of four states. Click a state to highlight its requests, their rows and their pages; click again to end it.">at this moment<//>
    <svg class="states" viewBox="0 0 560 84" role="group" aria-label="states of a request">
      <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"></path></marker></defs>
      ${ARROWS.map(([text, title], index) => html`<g class="arrow"><title>${title}</title>
        <path d=${`M${2 + index * STEP + WIDE + 2} ${middle}H${2 + (index + 1) * STEP - 3}`} marker-end="url(#head)"></path>
        <text x=${(index + .5) * STEP + WIDE / 2 + 1} y=${middle - 6}>${text}</text></g>`)}
      <g class="arrow"><title>The KV cache is full: a running request gives its slot and pages back and waits again.</title>
        <path d=${`M${centre(2)} ${bottom}V${low}H${centre(0)}V${bottom + 3}M${centre(1)} ${bottom}V${low}`} marker-end="none"></path>
        <path d=${`M${centre(0)} ${low}V${bottom + 2}`} marker-end="url(#head)"></path>
        <text x=${(centre(0) + centre(1)) / 2} y=${low - 5}>retract: <tspan data-figure="state_retractions">${whole(counters.retractions)}</tspan></text></g>
      ${STATES.map((name, index) => html`<${Box} key=${name} name=${name} index=${index} count=${phases[name]} lit=${lit} onLit=${onLit} />`)}</svg>
    <div class="told" aria-live="polite">${lit
      ? html`<p>${TEXTS[lit](run)}</p><div class="ids" tabindex="0" aria-label=${`requests in state ${lit}`}>${ids[lit].map(id => html`<span class="tag" key=${id} data-lit-id=${id}>${id}</span>`)}
          ${phases[lit] > ids[lit].length && html`<span class="soft">and ${whole(phases[lit] - ids[lit].length)} more</span>`}${!phases[lit] && html`<span class="soft">no request at this moment</span>`}</div>`
      : html`<p class="soft">Select a state to highlight its requests.</p>`}</div></section>`;
}
