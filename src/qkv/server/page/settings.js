// The panel of sampling parameters. An empty field is not sent: the model's own default holds.

import { $, preferences, showPanel } from "./dom.js";

const form = () => $("settings-form");

/** Fills the panel with what was chosen last and keeps every change. */
export function startSettings() {
  const kept = JSON.parse(preferences.get("settings") ?? "{}");
  for (const [name, value] of Object.entries(kept)) if (form().elements[name]) form().elements[name].value = value;
  form().addEventListener("input", keep);
  form().addEventListener("reset", () => setTimeout(keep));
  form().addEventListener("submit", (event) => event.preventDefault());
}

function keep() {
  preferences.set("settings", JSON.stringify(Object.fromEntries(new FormData(form()))));
}

/** Whether every field can be sent. If not, the browser points at the field and says what is wrong with it. */
export function settingsAreValid() {
  if (form().checkValidity()) return true;
  showPanel("settings", true);
  form().reportValidity();
  return false;
}

/** The fields of a request, without those that were left empty. */
export function chosenFields() {
  const { system, think, ...numbers } = Object.fromEntries(new FormData(form()));
  const filled = Object.entries(numbers).filter(([, value]) => value !== "");
  const fields = Object.fromEntries(filled.map(([name, value]) => [name, Number(value)]));
  if (think) fields.chat_template_kwargs = { enable_thinking: think === "on" };
  return fields;
}

export const systemPrompt = () => form().elements.system.value.trim();
