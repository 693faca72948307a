// The conversations and what can be done with them: ask, stop, edit, regenerate, rename, delete, export.

import { stream } from "./api.js";
import { $, announce, ask, download, h, isNarrow, showPanel } from "./dom.js";
import { t } from "./i18n.js";
import { Answer, userMessage } from "./message.js";
import { chosenFields, settingsAreValid, systemPrompt } from "./settings.js";
import * as store from "./store.js";

const SAVE_EVERY = 2000; // milliseconds between two saves of a growing answer
const running = new Map(); // conversation → AbortController of its answer
const views = new WeakMap(); // answer → its view, so that it keeps growing while another conversation is shown
let conversations = [];
let current;
let askForKey;

export async function startChat(onMissingKey) {
  askForKey = onMissingKey;
  conversations = await store.loadAll();
  for (const { messages } of conversations) {
    for (const message of messages) if (message.state === "running") message.state = "stopped"; // the page was closed
  }
  if (!(await store.isLasting())) notice("error_no_storage");
  open(conversations[0] ?? fresh());
}

const fresh = () => ({ id: `${Date.now()}-${Math.random()}`, title: "", updated: Date.now(), messages: [] });

export function newConversation() {
  open(current.messages.length ? fresh() : current);
  if (isNarrow()) showPanel("conversations", false);
  $("message").focus();
}

function open(conversation) {
  current = conversation;
  showAll();
  $("thread").scrollTop = $("thread").scrollHeight;
}

/** Draws the list and the thread anew, in the language of now. */
export function showAll() {
  showList();
  const messages = current.messages.map(elementOf);
  $("greeting").hidden = messages.length > 0;
  $("messages").replaceChildren(...messages);
  $("title").textContent = current.title || t("untitled");
  $("conversation-bar").hidden = messages.length === 0;
  showState();
}

function showList() {
  const entries = conversations.map((conversation) => {
    const pick = () => {
      open(conversation);
      if (isNarrow()) showPanel("conversations", false);
    };
    const attributes = { type: "button", onclick: pick, "aria-current": conversation === current && "true" };
    return h("li", {}, h("button", attributes, conversation.title || t("untitled")));
  });
  $("list").replaceChildren(...entries);
}

function showState() {
  const busy = running.has(current);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function elementOf(message) {
  const conversation = current;
  const place = () => conversation.messages.indexOf(message);
  if (message.role === "user") {
    return userMessage(message, { edit: (text) => sendFrom(conversation, place(), text) });
  }
  if (!running.has(conversation) || !views.has(message)) {
    const regenerate = () => sendFrom(conversation, place());
    views.set(message, new Answer(message, { regenerate, copied: () => announce(t("copied")) }));
  }
  return views.get(message).element;
}

/** Sends what stands in the message field. */
export function send() {
  const text = $("message").value;
  if (!text.trim() || running.has(current)) return;
  if (sendFrom(current, current.messages.length, text)) $("message").value = "";
}

/** Cuts a conversation at a place, puts a message there if one is given, and asks for the answer. */
function sendFrom(conversation, place, text) {
  if (!settingsAreValid()) return false;
  running.get(conversation)?.abort();
  conversation.messages.splice(place);
  if (text) conversation.messages.push({ role: "user", content: text });
  conversation.title ||= [...conversation.messages[0].content.trim().split("\n")[0]].slice(0, 60).join("");
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  answer(conversation);
  $("message").focus();
  return true;
}

async function answer(conversation) {
  const body = { ...chosenFields(), model: $("model").dataset.id, messages: wireMessages(conversation) };
  const message = { role: "assistant", content: "", reasoning: "", state: "running" };
  const controller = new AbortController();
  conversation.messages.push(message);
  running.set(conversation, controller);
  open(conversation);
  announce(t("answering"));
  keep(conversation);
  const saving = setInterval(() => keep(conversation), SAVE_EVERY);
  try {
    await receive(body, message, controller.signal);
    message.state = "done";
  } catch (error) {
    message.state = controller.signal.aborted ? "stopped" : "failed";
    if (message.state === "failed") message.error = errorOf(error);
  }
  clearInterval(saving);
  if (running.get(conversation) === controller) running.delete(conversation);
  finish(conversation, message);
}

function finish(conversation, message) {
  if (!conversation.messages.includes(message)) return; // it was cut off by an edit, or deleted
  views.get(message).update();
  follow();
  showState();
  announce(t(message.state === "done" ? "answered" : "stopped"));
  keep(conversation);
  if (message.error?.kind === "error_key") askForKey();
}

/** What is kept of an error. One that the interface did not raise is a fault of this page, and says so. */
function errorOf({ kind = "error_page", message, detail = message, status, retryAfter }) {
  return { kind, detail, status, retryAfter };
}

/** The messages as the interface wants them. An answer that failed before its first word is left out. */
function wireMessages({ messages }) {
  const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
  const said = messages.filter(({ role, content }) => role === "user" || content);
  return [...system, ...said.map(({ role, content }) => ({ role, content }))];
}

async function receive(body, message, signal) {
  const began = performance.now();
  let first;
  for await (const { choices, usage, timings } of stream(body, signal)) {
    const { delta = {}, finish_reason } = choices[0] ?? {};
    if (finish_reason) message.finish = finish_reason;
    if (usage) message.usage = usage;
    if (timings) message.speed = timings.predicted_per_second;
    if (delta.content || delta.reasoning_content) first ??= performance.now();
    take(message, delta, began);
  }
  const spent = (performance.now() - first) / 1000;
  if (message.usage && first) message.speed ??= message.usage.completion_tokens / spent;
}

function take(message, { content, reasoning_content: thought }, began) {
  if (!content && !thought) return;
  const view = views.get(message);
  const waited = !message.content && !message.reasoning;
  const thoughtEnds = content && !message.content && message.reasoning;
  message.reasoning += thought ?? "";
  message.content += content ?? "";
  if (thoughtEnds) message.seconds = (performance.now() - began) / 1000;
  view.addThought(thought);
  view.addText(content);
  if (waited || thoughtEnds) view.update();
  follow();
}

/** Keeps the end in view, unless the reader has scrolled away from it. */
let atEnd = true;
let touched = -Infinity; // when the reader's wheel, finger, mouse or keyboard was last at the thread
export function watchScrolling() {
  for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
    $("thread").addEventListener(kind, () => (touched = performance.now()), { passive: true });
  }
  $("thread").addEventListener("scroll", () => {
    const { scrollTop, clientHeight, scrollHeight } = $("thread");
    if (scrollTop + clientHeight > scrollHeight - 60) atEnd = true;
    else if (performance.now() - touched < 1500) atEnd = false; // else the text has moved, not the reader
  });
  new ResizeObserver(() => running.has(current) && follow()).observe($("messages"));
}
function follow() {
  if (atEnd) $("thread").scrollTop = $("thread").scrollHeight;
}

export function stop() {
  if (!running.has(current)) return;
  running.get(current).abort();
  $("message").focus();
}

async function keep(conversation) {
  if (!conversations.includes(conversation)) return;
  conversation.updated = Date.now();
  try {
    await store.save(conversation);
    if ($("notice").dataset.word === "error_storage") $("notice").hidden = true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    notice("error_storage");
  }
}

function notice(word) {
  Object.assign($("notice"), { hidden: false, textContent: t(word) }).dataset.word = word;
}

export async function rename() {
  const title = await ask(t("rename_label"), t("save"), { value: current.title });
  if (!title) return;
  current.title = title;
  await keep(current);
  showAll();
}

export async function removeCurrent() {
  const removed = current;
  if ((await ask(t("remove_question", { title: removed.title }), t("remove"))) === null) return;
  running.get(removed)?.abort();
  conversations = conversations.filter((one) => one !== removed);
  await store.remove(removed.id);
  $("notice").hidden = true;
  open(conversations[0] ?? fresh());
  announce(t("removed"));
  $("message").focus();
}

export function exportCurrent() {
  const name = current.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  download(`qkv-${name}.json`, JSON.stringify(current, null, 2));
}
