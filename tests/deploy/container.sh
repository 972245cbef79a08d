# A command as a container of the chart runs it, without a container engine: bash container.sh ROOT UID
# PATH... -- NAME=VALUE... COMMAND. Needs root and new mount, process, IPC and network namespaces
# (unshare).
#
# The root file system is read-only and holds the PATHs, read-only too; /tmp, /work, /checkpoints and
# /dev/shm are empty and may be written. The user is UID with group 0, without capabilities, and cannot
# get any.
set -e
new=$1 uid=$2
shift 2
mount -t tmpfs -o mode=755 tmpfs "$new"
mkdir "$new"/{proc,dev,tmp,work,checkpoints}
mount -t proc proc "$new/proc"
mount --bind /dev "$new/dev"
for folder in tmp work checkpoints dev/shm; do
    mount -t tmpfs -o mode=1777 tmpfs "$new/$folder"
done
while [ "$1" != -- ]; do
    mkdir -p "$new$1"
    mount --bind "$1" "$new$1"
    mount -o remount,bind,ro "$new$1"
    shift
done
shift
mount -o remount,ro "$new"
ip link set lo up
cd /
exec chroot "$new" setpriv --reuid="$uid" --regid=0 --clear-groups --bounding-set=-all \
    --inh-caps=-all --no-new-privs env --ignore-environment --chdir=/work "$@"
