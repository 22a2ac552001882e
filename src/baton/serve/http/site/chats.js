// The conversations and settings that this browser keeps. Bounded: the oldest conversations are dropped.

const CHATS = "baton.chats", SETTINGS = "baton.chat.settings";
const CHATS_MAX = 100;
const CHARACTERS_MAX = 2000000;

export function loadChats() { return read(CHATS, []); }
export function loadSettings() { return read(SETTINGS, {}); }
export function saveSettings(settings) { write(SETTINGS, settings); }

// Keep a conversation. Others are read again, because another tab may have changed them. Return whether it is kept.
export function saveChat(chat) {
  const chats = [chat, ...loadChats().filter(other => other.id !== chat.id)].slice(0, CHATS_MAX);
  while (chats.length && !(JSON.stringify(chats).length <= CHARACTERS_MAX && write(CHATS, chats))) chats.pop();
  return chats.length > 0;
}

export function deleteChat(id) { write(CHATS, loadChats().filter(chat => chat.id !== id)); }

export function newChat() { return {id: newId(), title: "", messages: []}; }

// A name for the list: the beginning of the first question.
export function titleOf(text) { return text.length > 60 ? `${text.slice(0, 57)}...` : text; }

function newId() { return [...crypto.getRandomValues(new Uint8Array(8))].map(byte => byte.toString(16).padStart(2, "0")).join(""); }

// What was written by another version of the page, or by hand, counts as nothing.
function read(name, otherwise) {
  try {
    const found = JSON.parse(localStorage.getItem(name));
    return found && Array.isArray(found) === Array.isArray(otherwise) ? found : otherwise;
  } catch (error) { return otherwise; }
}

function write(name, value) {
  try { localStorage.setItem(name, JSON.stringify(value)); return true; } catch (error) { return false; }
}
