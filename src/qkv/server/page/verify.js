// The promise, proved here: the same request alone, among eight, from the cache and streamed gives one answer.

import { complete, stream } from "./api.js";
import { $, h } from "./dom.js";
import { number, t } from "./i18n.js";
import { describeError } from "./message.js";

const TASK = "Write a few lines about the sea. Name its colours, its sounds and what lives in it. End with a question.";
const OTHERS = ["One.", "Count to ten.", "What is rain?", "Name a tree.", "Say hello.", "Why?", "Write a rhyme."];

export function showVerification() {
  $("verify-rows").replaceChildren();
  $("verify-result").textContent = "";
  $("verify-dialog").showModal();
  $("verify-run").focus();
}

/** Sends the request in four ways, one after the other, and shows a row for each. */
export async function runVerification(model) {
  // A number never used before: the first way finds nothing in the cache.
  const prompt = `${Math.random()}: ${TASK}`;
  const fields = { model, temperature: 0.8, seed: 7, max_tokens: 48 };
  const body = (content) => ({ ...fields, messages: [{ role: "user", content }] });
  const ways = {
    way_alone: () => complete(body(prompt)),
    way_eight: async () => (await Promise.all([prompt, ...OTHERS].map((text) => complete(body(text)))))[0],
    way_cached: () => complete(body(prompt)),
    way_streamed: () => streamed(body(prompt)),
  };
  $("verify-run").disabled = true;
  $("verify-rows").replaceChildren();
  $("verify-result").textContent = "…";
  try {
    const texts = new Set();
    for (const [way, request] of Object.entries(ways)) texts.add(showRow(way, await request()));
    $("verify-result").textContent = t(texts.size === 1 ? "verify_same" : "verify_different");
  } catch (error) {
    $("verify-result").textContent = describeError(error);
  } finally {
    $("verify-run").disabled = false;
  }
}

/** A streamed answer, put together again in the shape of a whole one. */
async function streamed(body) {
  const message = { content: "", reasoning_content: "" };
  let usage;
  for await (const chunk of stream(body)) {
    for (const name of Object.keys(message)) message[name] += chunk.choices[0]?.delta[name] ?? "";
    usage = chunk.usage ?? usage;
  }
  return { choices: [{ message }], usage };
}

function showRow(way, { choices: [{ message }], usage }) {
  const text = JSON.stringify([message.reasoning_content ?? "", message.content ?? ""]);
  const cached = number(usage.prompt_tokens_details?.cached_tokens ?? 0);
  const cells = [h("td", {}, t(way)), h("td", {}, h("code", {}, fingerprint(text))), h("td", { class: "end" }, cached)];
  $("verify-rows").append(h("tr", {}, ...cells));
  return text;
}

/** FNV-1a of 64 bits: the browser's SHA-256 is missing on plain HTTP. Equality is judged by the texts themselves. */
function fingerprint(text) {
  let hash = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(text)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return hash.toString(16).padStart(16, "0");
}
