# A RUN of the Dockerfile without a container engine: sh build.sh ROOT [PLACE FOLDER]... -- COMMAND. Needs
# root and a mount namespace of its own (unshare).
#
# ROOT becomes this machine's file system, in which each FOLDER is at its PLACE. COMMAND runs in /src.
set -e
new=$1
shift
mount -t tmpfs -o mode=755 tmpfs "$new"
for path in /* /opt/*; do
    if [ -L "$path" ]; then
        cp -P "$path" "$new$path"
    elif [ -d "$path" ] && [ "$path" != /opt ] && [ "$path" != /src ]; then
        mkdir -p "$new$path"
        mount --rbind "$path" "$new$path"
    fi
done
while [ "$1" != -- ]; do
    mkdir -p "$new$1"
    mount --bind "$2" "$new$1"
    shift 2
done
shift
exec chroot "$new" sh -c "cd /src && $1"
