#!/bin/sh
# Save a warm, idle `baton serve` with its workers to a folder, and continue it from there. Needs CRIU, and root.
#
#   checkpoint.sh save PID FOLDER     # the server ends once it is saved
#   checkpoint.sh restore FOLDER      # it continues, with the same process ids
#
# Processes with GPUs also need cuda-checkpoint on the PATH. See docs/integrations/checkpoint.md.
set -eu

usage() {
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

descendants() {
    echo "$1"
    for child in $(cat "/proc/$1/task/$1/children"); do
        descendants "$child"
    done
}

gpu_processes() {
    for pid in $(descendants "$1"); do
        if ls -l "/proc/$pid/fd" | grep -q '/dev/nvidia[0-9]'; then
            echo "$pid"
        fi
    done
}

toggle() {
    for pid in $1; do
        cuda-checkpoint --toggle --pid "$pid"
    done
}

report() {
    echo "checkpoint.sh: CRIU failed; the end of $1:" >&2
    grep -a -E 'Error|Warn' "$1" | tail -n 8 >&2 || tail -n 8 "$1" >&2
    exit 1
}

save() {
    pid=$1 folder=$2
    [ -d "/proc/$pid" ] || { echo "checkpoint.sh: there is no process $pid" >&2; exit 2; }
    mkdir -p "$folder"
    gpus=$(gpu_processes "$pid")
    echo "$gpus" >"$folder/gpu-processes"
    toggle "$gpus"
    if ! criu dump --tree "$pid" --images-dir "$folder" --log-file dump.log --tcp-close --file-locks; then
        toggle "$gpus"
        report "$folder/dump.log"
    fi
}

restore() {
    folder=$1
    [ -f "$folder/gpu-processes" ] || { echo "checkpoint.sh: $folder has no saved server" >&2; exit 2; }
    criu restore --images-dir "$folder" --log-file restore.log --restore-detached --tcp-close --file-locks ||
        report "$folder/restore.log"
    toggle "$(cat "$folder/gpu-processes")"
}

case "${1-}" in
save) [ $# = 3 ] || usage; save "$2" "$3" ;;
restore) [ $# = 2 ] || usage; restore "$2" ;;
*) usage ;;
esac
