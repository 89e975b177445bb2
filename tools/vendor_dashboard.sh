#!/usr/bin/env bash
# Fetches the dashboard's JavaScript libraries again, from the registry that npm is set up with, in these versions.
# Needs npm and tar. Run it after changing a version, and look at the dashboard before committing.
set -euo pipefail
preact=11.2.0 htm=3.1.1 uplot=1.6.32

vendor="$(cd "$(dirname "$0")/.." && pwd)/mlx_parallm/server/dashboard/static/vendor"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"

get() { # package version: unpacks it into a folder of its name
  npm pack --silent "$1@$2" >/dev/null
  mkdir "$1"
  tar xzf "$1-$2.tgz" -C "$1" --strip-components 1
  cp "$1/LICENSE" "$vendor/$1.LICENSE.txt"
}

mkdir -p "$vendor"
rm -f "$vendor"/*
get preact "$preact"
get htm "$htm"
get uplot "$uplot"
# A browser knows no package names: the one import among them becomes a path. Source maps are not shipped.
strip() { sed -e '/^\/\/# sourceMappingURL=/d' "$1"; }
strip preact/dist/preact.mjs >"$vendor/preact.js"
strip preact/hooks/dist/hooks.mjs | sed -e 's|from"preact"|from"./preact.js"|' >"$vendor/hooks.js"
strip htm/dist/htm.module.js >"$vendor/htm.js"
strip uplot/dist/uPlot.iife.min.js >"$vendor/uplot.js"
cp uplot/dist/uPlot.min.css "$vendor/uplot.css"
printf '{"preact": "%s", "htm": "%s", "uplot": "%s"}\n' "$preact" "$htm" "$uplot" >"$vendor/versions.json"
grep -q 'from"./preact.js"' "$vendor/hooks.js" || { echo "hooks.js imports preact in another way" >&2; exit 1; }
