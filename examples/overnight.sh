#!/bin/sh
# A job for the night: the checksum of every file in a folder, computed when nobody needs the machine.
#
#   penstock submit --when quiet --quiet-for 10m --cost 40 -- "$PWD/examples/overnight.sh" "$HOME/Pictures" "$HOME/sums.txt"
#   penstock explain last        why it waits
#   penstock logs -f last
#
# It begins when the machine has been quiet for ten minutes. Somebody who comes back, a more urgent job, a shutdown: it is asked to stop, does so
# between two files, and goes on with the next file when it is quiet again. What it has done is known to the scheduler, as its checkpoint.
set -eu
folder=$1 sums=$2
job() { ${PENSTOCK:-penstock} job "$@"; }

done=$(job checkpoint)
done=${done:-0}
total=$(find "$folder" -type f | wc -l)
number=0
find "$folder" -type f | sort | while read -r file; do
    number=$((number + 1))
    [ "$number" -gt "$done" ] || continue
    sha256sum "$file" >>"$sums"
    job checkpoint "$number"
    job progress "$(awk "BEGIN { print $number / $total }")"
    if job should-yield; then
        echo "stopped after $number of $total files"
        job yield
        exit 0
    fi
done
