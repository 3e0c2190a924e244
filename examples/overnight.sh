#!/bin/sh
# A job for the night: computes the checksum of every file in a folder while the machine is quiet.
#
#   penstock submit --when quiet --quiet-for 10m --cost 40 -- \
#       "$PWD/examples/overnight.sh" "$HOME/Pictures" "$HOME/sums.txt"
#   penstock explain last        why it waits
#   penstock logs -f last
#
# It starts when the machine has been quiet for ten minutes. When a user returns, a more urgent job comes or the
# daemon stops, the scheduler asks it to stop. It stops between two files and continues with the next file when the
# machine is quiet again. Its checkpoint is the number of the last file.
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
