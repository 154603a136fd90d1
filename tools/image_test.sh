#!/usr/bin/env bash
# The built image as a pod would run it, without Docker or Kubernetes: a head and a worker, each a user 1000:100 without
# capabilities in a read-only root with nothing but /tmp to write to, in network namespaces of their own. A Serve config is
# deployed as KubeRay does it, and tokens are streamed through the HAProxy of either. Then a second worker joins, and the first
# one, on which everything runs, is sent SIGTERM under load. Needs root, buildah, iproute2; some minutes.
#
#   tools/image_test.sh [IMAGE] [SERVE_CONFIG]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
image=${1:-orca-serve:$(PYTHONPATH=tools $python -c 'from pathlib import Path; from k8s_check.facts import read_facts; print(read_facts(Path.cwd()).tag)')}
config=${2:-configs/cluster-cpu.yaml}
# shellcheck disable=SC2034 # by name
head=10.77.0.1 worker=10.77.0.2 second=10.77.0.3
patience_s=300 long=600 # seconds, tokens

work=$(mktemp -d /tmp/orca-image.XXXXXX)
run=${work##*.}
declare -A pids=()
container=

finish() {
    local status=$? name
    trap - EXIT
    { # the shell would say of each that it was killed
        for name in head worker second; do # unshare's --kill-child would not do: who changes its user forgets that
            ip netns pids "orca-$name-$run" | xargs -r kill -KILL || true
        done
        wait || true
    } 2>/dev/null
    for name in head worker second; do ip netns delete "orca-$name-$run" 2>/dev/null || true; done
    if [[ -n $container ]]; then buildah rm "$container" >/dev/null || true; fi
    ((status == 0)) || tail -n 20 "$work"/*.log 2>/dev/null || true
    rm -rf "$work"
    exit "$status"
}
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

say() { printf '%6.1f s  %s\n' "$(since_start)" "$*"; }
since_start() { $python -c "import time; print(time.time() - $began)"; }

# what the image and the manifest say, not what this shell has
environment() { # head or worker
    buildah inspect --type image --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$image"
    $python - "$1" <<'PYTHON'
import sys
import yaml

spec = yaml.safe_load(open("k8s/base/rayservice.yaml"))["spec"]["rayClusterConfig"]
group = spec["headGroupSpec"] if sys.argv[1] == "head" else spec["workerGroupSpecs"][0]
for each in group["template"]["spec"]["containers"][0]["env"]:
    print(f"{each['name']}={each['value']}")
PYTHON
    printf 'RAY_AUTH_MODE=token\nRAY_AUTH_TOKEN=%s\n' "$token"
}

# mounts of a pod, in a mount namespace of its own; $1: folder for the root, the rest is run there
pod=$(
    cat <<'SHELL'
set -euo pipefail
root=$1 base=$2 tmp=$3
shift 3
mkdir -p "$root"
mount --bind "$base" "$root"
mount -o remount,ro,bind "$root"
mount -t proc proc "$root/proc"
mount --rbind -o ro /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount --bind "$tmp" "$root/tmp"
exec chroot "$root" setpriv --reuid=1000 --regid=100 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
    env -i --chdir=/tmp "$@"
SHELL
)

in_pod() { # head or worker, command…
    local name=$1 variables
    shift
    mapfile -t variables < <(environment "$name")
    exec ip netns exec "orca-$name-$run" unshare --mount --pid --fork --propagation private \
        bash -c "$pod" pod "$work/$name" "$base" "$work/$name-tmp" "${variables[@]}" "$@"
}

start() { # head or worker, arguments of `ray start`…
    local name=$1
    shift
    in_pod "$name" bash -lc "exec ray start --block $*" >"$work/$name.log" 2>&1 &
    pids[$name]=$!
}

start_worker() { # worker or second
    start "$1" "--address=$head:6379" "--node-ip-address=${!1}" --num-cpus=5 --object-store-memory=200000000
}

generate() { # tokens, more arguments…
    in_pod head orca-serve generate "Once upon a time" --ignore-eos --address "$head:9000" --max-new-tokens "$@"
}

wait_for() { # what, command… in the head's pod
    local what=$1 deadline=$((SECONDS + patience_s))
    shift
    until (in_pod head "$@") >"$work/wait.log" 2>&1; do
        ((SECONDS < deadline)) || { echo "not within $patience_s s: $what" >&2; exit 1; }
        kill -0 "${pids[head]}" || { echo "the head has ended" >&2; exit 1; }
        sleep 0.5
    done
    say "$what"
}

container=$(buildah from --pull-never "$image")
base=$(buildah mount "$container")
token=$($python -c 'import secrets; print(secrets.token_hex(32))')
for name in head worker second; do
    ip netns add "orca-$name-$run"
    ip -n "orca-$name-$run" link set lo up
    install -d -m 1777 "$work/$name-tmp" # the emptyDir of the pod
done
ip -n "orca-head-$run" link add bridge type bridge
ip -n "orca-head-$run" addr add "$head/24" dev bridge
ip -n "orca-head-$run" link set bridge up
for name in worker second; do
    ip link add "$name" netns "orca-head-$run" type veth peer name eth0 netns "orca-$name-$run"
    ip -n "orca-head-$run" link set "$name" master bridge up
    ip -n "orca-$name-$run" addr add "${!name}/24" dev eth0
    ip -n "orca-$name-$run" link set eth0 up
done

# shellcheck disable=SC2016 # expanded in there
(in_pod worker bash -c '! touch /opt/a /etc/a /usr/a 2>/dev/null && test -w /tmp && test "$(id -u):$(id -g)" = 1000:100 \
    && command -v bash wget python ray serve orca-serve g++ && test -x /usr/local/bin/orca-haproxy') >/dev/null
echo "image: not root, read-only, and everything is on the path"

began=$($python -c 'import time; print(time.time())')
start head --head --port=6379 --node-ip-address=$head --num-cpus=0 --dashboard-host=0.0.0.0 --object-store-memory=200000000
wait_for "Ray's head answers" python -c "import urllib.request as r; r.urlopen('http://$head:8265/api/gcs_healthz')"
start_worker worker
cp "$config" "$work/head-tmp/serve.yaml"
wait_for "the Serve config is taken" serve deploy --address http://$head:8265 /tmp/serve.yaml
wait_for "first token through the head" orca-serve generate "The sky is" --max-new-tokens 1 --address $head:9000
for target in $head $worker; do
    said=$(in_pod head orca-serve generate "The sky is blue because" --max-new-tokens 24 --address "$target:9000" 2>"$work/generate.log")
    [[ -n $said ]] || { echo "nothing was streamed from $target" >&2; exit 1; }
    say "streamed from $target:9000: $(tr '\n' ' ' <<<"$said")"
done

# a worker leaves, as at the deletion of its pod: what it has begun it finishes, and nothing is refused meanwhile
alone=$(generate "$long" 2>"$work/generate.log")
start_worker second
wait_for "a second worker joins" bash -c "test \$(ray list nodes --address http://$head:8265 | grep -c ALIVE) -eq 3"
declare -A streams=()
for number in 1 2 3 4 5 6; do
    # some come through HAProxies that stay, some through that of the worker that leaves
    ((number <= 4)) && target=$head || target=$worker
    (generate "$long" --address "$target:9000") >"$work/stream$number" 2>"$work/stream$number.log" &
    streams[$number]=$!
done
for number in 1 2 3 4 5 6; do until [[ -s $work/stream$number ]]; do kill -0 "${streams[$number]}"; sleep 0.1; done; done
say "four streams run, and two through the worker that leaves"
read -ra children <"/proc/${pids[worker]}/task/${pids[worker]}/children" || true # its only one, or with a shell that has ended
kill -TERM "${children[@]}"
asked=0 deadline=$((SECONDS + patience_s))
while kill -0 "${pids[worker]}" 2>/dev/null; do
    ((SECONDS < deadline)) || { echo "the first worker does not end" >&2; exit 1; }
    (generate 1) >/dev/null 2>"$work/generate.log" || { echo "request $asked while it leaves was not served" >&2; exit 1; }
    asked=$((asked + 1))
done
say "the first worker has left; $asked requests served meanwhile"
for number in 1 2 3 4 5 6; do
    wait "${streams[$number]}" || { echo "stream $number was cut" >&2; exit 1; }
    [[ $(<"$work/stream$number") == "$alone" ]] || { echo "stream $number says something else" >&2; exit 1; }
done
(generate 1) >/dev/null 2>"$work/generate.log"
say "all six streams say what one said alone; the second worker serves"

[[ -z $(find "$work" -name 'orca-*.so') ]] || { echo "kernels were compiled although the image has them" >&2; exit 1; }
echo "image: works"
