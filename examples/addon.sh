#!/bin/sh
# An add-on in any language: one job from submit to DONE, with nothing but curl.
#
#   submit -> (the scheduler decides when) -> dispatchable -> lease -> ack -> heartbeat -> complete
#
# Address and token come from the environment:
#   PENSTOCK_URL         http://127.0.0.1:8420
#   PENSTOCK_TOKEN_FILE  the file `token` in the scheduler's data directory
set -eu
url=${PENSTOCK_URL:-http://127.0.0.1:8420}/api/system/scheduler
token=$(cat "${PENSTOCK_TOKEN_FILE:-${XDG_DATA_HOME:-$HOME/.local/share}/penstock/token}")

# curl reads the token from a pipe: every user of the machine can read arguments.
ask() { # ask METHOD PATH [BODY]: puts the JSON answer into $answer; a refusal ends the script with its message
    answer=$(printf 'header = "Authorization: Bearer %s"\n' "$token" |
        curl --silent --show-error --fail-with-body --max-time 40 --config - \
            --request "$1" "$url/$2" ${3:+--header 'Content-Type: application/json' --data "$3"}) || {
        echo "$answer" >&2
        exit 1
    }
}

field() { # field NAME: the first value of a field in $answer. Enough for ids and states; use a real parser for more.
    echo "$answer" | sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" | head -n 1
}

echo "1. submit: the answer means that the job is on disk"
ask POST queue/jobs/submit '{
  "addon_id": "visuals", "job_type": "indexing", "cost_units": 30, "priority": "NORMAL",
  "constraints": {"cpu_heavy": true, "disk_write_heavy": false, "network_heavy": false},
  "expected_duration_sec": 120, "payload": {"path": "/some/dir"}, "time_sensitive": false
}'
job=$(field job_id)
echo "   job $job"

echo "2. wait until the scheduler lets it start"
while :; do
    ask GET "queue/jobs/$job/explain"
    echo "   $(field text)"
    ask GET "queue/dispatchable?addon_id=visuals&wait_sec=20"
    case $answer in *"$job"*) break ;; esac
done

echo "3. request the lease: this takes the reserved units"
ask POST lease/request "{\"job_id\": \"$job\", \"worker\": \"addon.sh\"}"
lease=$(field lease_id)
echo "   lease $lease"
ask POST "queue/jobs/$job/ack" "{\"lease_id\": \"$lease\"}"

echo "4. work, and renew the lease before it ends (30 s); the answer says whether to stop"
for progress in 0.25 0.50 0.75; do
    sleep "${STEP_SEC:-1}"
    ask POST lease/heartbeat "{\"lease_id\": \"$lease\", \"progress\": $progress, \"spent\": 0.01}"
    echo "   $progress done"
    case $answer in *'"cancel":true'*)
        echo "   the scheduler asks to stop"
        ask POST lease/release "{\"lease_id\": \"$lease\"}"
        exit 1
        ;;
    esac
done

echo "5. complete"
ask POST "queue/jobs/$job/complete" "{\"lease_id\": \"$lease\", \"state\": \"DONE\", \"result\": {\"files\": 42}}"
echo "   $(field state)"

echo "6. a heartbeat after the end is refused and changes nothing"
if (ask POST lease/heartbeat "{\"lease_id\": \"$lease\"}") 2>/dev/null; then
    echo "   error: the heartbeat was accepted"
    exit 1
fi
ask GET "queue/jobs/$job"
echo "   the job is $(field state)"
