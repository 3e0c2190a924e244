// Formats numbers, times and ids.
export const short = (id) => (id ? id.slice(-8) : "");

export const count = (n) =>
  n == null ? "–" : n < 10_000 ? n.toLocaleString("en") : n < 1e6 ? `${(n / 1e3).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(2)}M`;

export function span(seconds) {
  if (seconds == null || Number.isNaN(seconds)) return "–";
  const s = Math.abs(seconds);
  if (s === 0) return "0 s";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${s < 0.01 ? (s * 1e3).toFixed(1) : Math.round(s * 1e3)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 600) return parts(Math.round(s), 60, "min", "s");
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172_800) return parts(Math.round(s / 60), 60, "h", "min");
  return `${Math.round(s / 86_400)} days`;
}

// Rounded before it is split into parts, so that no part is 60.
const parts = (whole, size, large, small) => {
  const rest = whole % size;
  return `${Math.floor(whole / size)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
};

export const since = (iso, now = Date.now()) => (iso ? (now - Date.parse(iso)) / 1000 : null);

export function ago(iso, now) {
  const s = since(iso, now);
  if (s == null) return "–";
  // The page's clock is that of the last frame, so a new event may be a second ahead of it.
  return s < -1.5 ? `in ${span(-s)}` : s < 1 ? "now" : `${span(s)} ago`;
}

export const clock = (iso) => (iso ? new Date(iso).toLocaleTimeString([], { hour12: false }) : "–");
export const moment = (iso) => (iso ? new Date(iso).toLocaleString([], { hour12: false }) : "–");
export const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;
// A moment to the second, with its zone.
export const exact = (iso) => (iso ? `${moment(iso)} (${ZONE})` : "");
export const percent = (x) => (x == null ? "" : `${Math.round(x * 100)} %`);
export const money = (amount, unit = "USD") =>
  amount ? `${amount < 0.01 ? amount.toPrecision(2) : amount.toFixed(2)} ${unit}` : "–";

export function json(value) {
  if (value === undefined) return "";
  try {
    return JSON.stringify(value, null, 2);
  } catch {
    return String(value);
  }
}
