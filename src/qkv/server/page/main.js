// Starts the page: words, theme, panels, buttons; then the model's name and the conversations.

import { key, models } from "./api.js";
import * as chat from "./chat.js";
import { $, ask, copyText, isNarrow, preferences, showPanel } from "./dom.js";
import { number, switchLanguage, t, translatePage } from "./i18n.js";
import { describeError } from "./message.js";
import { startSettings } from "./settings.js";
import { runVerification, showVerification } from "./verify.js";

const onClick = (id, action) => $(id).addEventListener("click", action);

/** Without a theme of his own the reader has the system's. */
function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme-button").ariaPressed = String(theme === "dark");
}

async function showModel() {
  try {
    const [{ id, max_model_len: context, capabilities }] = await models();
    $("model").dataset.id = id;
    $("settings-form").elements.think.disabled = capabilities?.thinking === false;
    $("model").textContent = context ? t("context", { model: id, count: number(context) }) : id;
  } catch (error) {
    if (error.kind === "error_key") return askForKey();
    $("model").textContent = describeError(error);
  }
}

async function askForKey() {
  const given = await ask(t("key_question"), t("save"), { type: "password", pattern: "[!-~]+" });
  if (!given) return;
  key.set(given);
  await showModel();
}

function toggle(name) {
  showPanel(name, $(`${name}-panel`).hidden);
  if (!$(`${name}-panel`).hidden) $(`${name}-panel`).querySelector("button, textarea").focus();
}

translatePage();
showTheme(preferences.get("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
startSettings();
showPanel("settings", false);
showPanel("conversations", !isNarrow());
chat.watchScrolling();

for (const name of ["conversations", "settings"]) onClick(`${name}-button`, () => toggle(name));
onClick("new-button", chat.newConversation);
onClick("rename-button", chat.rename);
onClick("remove-button", chat.removeCurrent);
onClick("export-button", chat.exportCurrent);
onClick("stop", chat.stop);
onClick("verify-button", showVerification);
onClick("verify-run", () => runVerification($("model").dataset.id));
onClick("theme-button", () => {
  showTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  preferences.set("theme", document.documentElement.dataset.theme);
});
onClick("language-button", () => {
  switchLanguage();
  chat.showAll();
  showModel();
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.send();
});
$("message").addEventListener("keydown", (event) => {
  // Enter also confirms a word while Chinese is typed, and a phone has no Shift+Enter.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  chat.send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open], .editing")) chat.stop();
});
document.addEventListener("click", async ({ target }) => {
  if (target.matches(".dismiss")) target.closest("dialog").close();
  if (!target.matches("[data-copy]")) return;
  await copyText(target.closest("figure").querySelector("code").textContent);
  target.textContent = t("copied");
  setTimeout(() => (target.textContent = t("copy")), 2000);
});

await chat.startChat(askForKey);
await showModel();
