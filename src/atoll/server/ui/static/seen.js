// Failures that this browser has shown: the list folds them.

const KEY = "atoll-seen";
const MAX_SEEN = 500; // more than a day of failures has; the oldest are forgotten

export function seenFailures() {
  try {
    return new Set(JSON.parse(localStorage.getItem(KEY) || "[]"));
  } catch {
    return new Set();
  }
}

export function markSeen(...uids) {
  const all = [...new Set([...seenFailures(), ...uids])].slice(-MAX_SEEN);
  localStorage.setItem(KEY, JSON.stringify(all));
}
