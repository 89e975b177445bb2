// Numbers as people read them. Every function shows "–" for what is not known.
const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function number(value, digits = 0) {
  if (!known(value)) return NONE;
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
}

export function short(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6, 1)} M`;
  if (size >= 1e4) return `${number(value / 1e3, 1)} k`;
  if (size >= 100) return number(value);
  if (size >= 0.01) return number(value, size >= 10 ? 1 : size >= 1 ? 2 : 3);
  return value.toExponential(1);
}

export function rate(value) {
  return known(value) ? number(value, value < 100 ? 1 : 0) : NONE;
}

export function percent(value, digits = 0) {
  return known(value) ? `${number(100 * value, digits)} %` : NONE;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (Math.abs(value) >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${number(value, value < 10 && place ? 1 : 0)} ${units[place]}`;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 1) return `${number(1000 * value, value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${number(value, value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${number(value / 60, 1)} min`;
  return `${number(value / 3600, 1)} h`;
}

export function clock(time) {
  return known(time) ? new Date(1000 * time).toLocaleTimeString("en-GB") : NONE;
}

export function date(time) {
  return known(time) ? new Date(1000 * time).toLocaleString("en-GB") : NONE;
}
