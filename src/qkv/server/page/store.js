// Conversations, kept in this browser's IndexedDB. Where that is forbidden, they live as long as the page.

const NAME = "conversations";

const database = new Promise((resolve) => {
  let request;
  try {
    request = indexedDB.open("qkv", 1);
  } catch {
    return resolve(null);
  }
  request.onupgradeneeded = () => request.result.createObjectStore(NAME, { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = request.onblocked = () => resolve(null);
});

/** Whether anything is kept beyond this visit. */
export const isLasting = async () => (await database) !== null;

async function transact(mode, work) {
  const opened = await database;
  if (!opened) return [];
  return new Promise((resolve, reject) => {
    const transaction = opened.transaction(NAME, mode);
    const request = work(transaction.objectStore(NAME));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** All conversations, the latest first. */
export async function loadAll() {
  const found = await transact("readonly", (store) => store.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

/** Rejects with a QuotaExceededError where the browser's storage is full. */
export const save = (conversation) => transact("readwrite", (store) => store.put(conversation));

export const remove = (id) => transact("readwrite", (store) => store.delete(id));
