// Every sentence of the page, in English and in Chinese. `{name}` is filled in by the caller.

import { preferences } from "./dom.js";

export const WORDS = {
  skip: ["Skip to the message field", "跳到输入框"],
  conversations: ["Chats", "对话"],
  thread: ["Messages of this conversation", "本对话的消息"],
  settings: ["Settings", "设置"],
  verify: ["Verify", "验证"],
  dark: ["Dark theme", "深色主题"],
  other_language: ["中文", "English"],
  untitled: ["New conversation", "新对话"],
  rename: ["Rename", "重命名"],
  remove: ["Delete", "删除"],
  export: ["Export", "导出"],
  close: ["Close", "关闭"],
  cancel: ["Cancel", "取消"],
  save: ["Save", "保存"],
  rename_label: ["Name of this conversation", "对话名称"],
  remove_question: ["Delete “{title}”? It cannot be brought back.", "删除“{title}”？删除后无法恢复。"],
  removed: ["Conversation deleted.", "对话已删除。"],
  greeting: ["What would you like to know?", "想问点什么？"],
  greeting_hint: [
    "Each answer weighs your query against the keys and values of all that was said before.",
    "每个回答，都是用查询 (query) 比对此前内容的键 (key)，再取出对应的值 (value)。",
  ],
  message: ["Message", "消息"],
  message_hint: ["Write a message", "输入消息"],
  send: ["Send", "发送"],
  stop: ["Stop", "停止"],
  you: ["You", "你"],
  model: ["Answer", "回答"],
  edit: ["Edit", "编辑"],
  edit_hint: ["What follows this message is replaced.", "此消息之后的内容将被替换。"],
  send_again: ["Send again", "重新发送"],
  regenerate: ["Regenerate", "重新生成"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  code: ["Code {language}", "代码 {language}"],
  table: ["Table", "表格"],
  formula: ["Formula", "公式"],
  thinking: ["Thinking…", "思考中…"],
  thought: ["Thought for {seconds} s", "思考了 {seconds} 秒"],
  thought_unknown: ["Thinking", "思考过程"],
  reading: ["Reading the prompt…", "正在读取提示…"],
  answering: ["Answering", "正在回答"],
  answered: ["The answer is complete.", "回答完毕。"],
  stopped: ["Stopped.", "已停止。"],
  cut_at_limit: ["Cut at the limit of tokens.", "已达词元上限，回答被截断。"],
  speed: ["{speed} tokens/s", "{speed} 词元/秒"],
  tokens: ["{count} tokens", "{count} 词元"],
  cached: ["prompt {count}, {share} cached", "提示 {count}，{share} 来自缓存"],
  error_key: ["The server wants an API key, or another one than it was given.", "服务器需要 API 密钥，或密钥不正确。"],
  error_busy: ["The server is busy. Try again in a moment.", "服务器繁忙，请稍后再试。"],
  error_busy_until: ["The server is busy. Try again in {seconds} s.", "服务器繁忙，请在 {seconds} 秒后再试。"],
  error_unreachable: ["The server does not answer. Is `qkv serve` still running?", "服务器没有响应。`qkv serve` 还在运行吗？"],
  error_server: ["The server refused the request ({status}).", "服务器拒绝了请求（{status}）。"],
  error_cut: ["The connection ended before the answer was complete.", "连接在回答完成之前中断。"],
  error_page: ["This page has a fault:", "页面出错："],
  error_storage: [
    "This browser's storage is full: new messages are lost when you leave. Export or delete conversations.",
    "浏览器存储已满：离开页面后新消息会丢失。请导出或删除一些对话。",
  ],
  error_no_storage: [
    "This browser forbids storage: conversations are lost when you leave. Export what you want to keep.",
    "浏览器禁止存储：离开页面后对话会丢失。请导出需要保留的内容。",
  ],
  key_question: [
    "The server asks for its API key. It is kept in this tab until you close it.",
    "服务器需要 API 密钥。密钥仅保存在此标签页中，关闭后清除。",
  ],
  system: ["System prompt", "系统提示"],
  system_hint: ["Said to the model before everything else", "在所有对话之前告诉模型的话"],
  own_choice: ["the model's own", "模型默认"],
  temperature: ["Temperature", "温度 (temperature)"],
  top_p: ["Top p", "Top p"],
  top_k: ["Top k", "Top k"],
  min_p: ["Min p", "Min p"],
  max_tokens: ["Most tokens", "最多词元"],
  seed: ["Seed", "随机种子"],
  seed_hint: ["another each time", "每次不同"],
  think: ["Thinking", "思考模式"],
  think_default: ["The model's own", "模型默认"],
  think_on: ["On", "开启"],
  think_off: ["Off", "关闭"],
  reset: ["Back to the model's own", "恢复模型默认"],
  context: ["{model} · context {count}", "{model} · 上下文 {count}"],
  verify_title: ["Same answer, however it is asked", "无论怎么问，回答都一样"],
  verify_hint: [
    "One seeded request is sent in four ways. The answers must be equal to the last character.",
    "同一个固定种子的请求以四种方式发送，回答必须逐字相同。",
  ],
  verify_run: ["Run the check", "开始验证"],
  verify_way: ["Way", "方式"],
  verify_hash: ["Hash of the answer", "回答的哈希值"],
  verify_cached: ["Cached", "缓存"],
  way_alone: ["Alone", "单独"],
  way_eight: ["Among eight", "八个并发之一"],
  way_cached: ["From the cache", "使用缓存"],
  way_streamed: ["Streamed", "流式"],
  verify_same: ["Equal: four ways, one answer.", "一致：四种方式，同一个回答。"],
  verify_different: ["Different! Please report this with the model and the version.", "不一致！请附上模型和服务器版本报告此问题。"],
};

const LANGUAGES = ["en", "zh"];
let language = preferences.get("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");

/** The sentence of that name in the language chosen, with its places filled in. */
export function t(name, values = {}) {
  const text = WORDS[name][LANGUAGES.indexOf(language)];
  return text.replace(/\{(\w+)\}/g, (_, place) => values[place]).trim();
}

export const number = (value, options) => new Intl.NumberFormat(language, options).format(value);

/** Writes all words of the page that carry a data-t, data-label or data-hint attribute. */
export function translatePage() {
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of document.querySelectorAll("[data-label]")) element.ariaLabel = t(element.dataset.label);
  for (const element of document.querySelectorAll("[data-hint]")) element.placeholder = t(element.dataset.hint);
}

export function switchLanguage() {
  language = language === "en" ? "zh" : "en";
  preferences.set("language", language);
  translatePage();
}
