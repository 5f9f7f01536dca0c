#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs a program in a virtual machine with RDMA devices of Linux's Soft-RoCE (rdma_rxe), so it needs no NIC. QEMU boots
# Debian's own kernel in software emulation. The machine's files are the program, its libraries, and the image (see
# below). The machine has no disk, and no network but its own.
#
# usage: soft-roce.sh [OPTION...] [--] PROGRAM [ARGUMENT...]
#        soft-roce.sh --facts        prints the machine's RDMA devices, and the results of a pingpong over each path
#        soft-roce.sh --prepare      only builds the image
#
#   --seconds N      ends the machine after N seconds (600)
#   --env NAME=VALUE sets a variable in the program's environment
#   --file PATH      copies one more file or folder to the same path in the machine
#   --with PROGRAM   copies one more program, with its libraries, to /bin
#   --setup COMMANDS runs these shell commands first
#   --memory MIB     gives the machine this much memory (2048)
#   --no-facts       omits the devices' facts and the pingpong
#   --input          passes the input of this script on to the program
#   --host N WIRE    boots machine N, 1 or 2, of two that are joined. The first machine creates the socket WIRE, so it
#                    must be started before the second
#
# The exit status is the program's. It is 120 if the machine did not run the program, and 124 if the time was over. The
# script then names a folder, whose console.log has the messages of the kernel.
#
# The machine has these devices:
#   rxe0         on dummy0, 10.7.0.1: its packets return inside the driver, and none is ever lost
#   rxe1, rxe2   on v1, 10.7.1.1, and v2, 10.7.2.1, the two ends of a wire (veth): packets really travel, so tc and ip
#                can lose and delay them and cut the wire
#   rxe3         with --host, on eth0, 10.8.0.N: connected to the other machine
#
# As root on Debian it installs missing packages; otherwise it prints which to install. The image is kept in
# target/soft-roce.

set -euo pipefail
cd "$(dirname "$0")/.."

# QEMU, the tools that build the image, and the programs and libraries in the image.
PACKAGES=(qemu-system-x86 busybox-static cpio kmod iproute2 ibverbs-utils ibverbs-providers perftest)
PROGRAMS=(/bin/busybox ip tc rdma ibv_devinfo ibv_rc_pingpong ib_write_bw ib_atomic_lat)
MODULES=(crc32_generic rdma_rxe ib_uverbs veth dummy sch_netem virtio_pci virtio_net)
cache="${CARGO_TARGET_DIR:-target}/soft-roce"

fail() {
    printf 'soft-roce: %s\n' "$*" >&2
    exit 120
}

seconds=600 memory=2048 facts=1 prepare= input= host=1 wire=
environment=() files=() more=() setup=
while [ $# -gt 0 ]; do
    case $1 in
        --seconds) seconds=$2; shift 2 ;;
        --memory) memory=$2; shift 2 ;;
        --env) environment+=("$2"); shift 2 ;;
        --file) files+=("$2"); shift 2 ;;
        --with) more+=("$2"); shift 2 ;;
        --setup) setup+="$2"$'\n'; shift 2 ;;
        --facts) set -- --; facts=1 ;;
        --no-facts) facts=; shift ;;
        --input) input=1; shift ;;
        --host) host=$2 wire=$3; shift 3 ;;
        --prepare) prepare=1; shift ;;
        --) shift; break ;;
        -*) fail "unknown option $1; the options are listed at the top of this script" ;;
        *) break ;;
    esac
done

install_packages() {
    local missing=() package
    for package in "${PACKAGES[@]}"; do
        dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "packages are missing; on Debian, as root: apt-get install ${missing[*]}"
    printf 'soft-roce: installing Debian packages: %s\n' "${missing[*]}" >&2
    apt-get update -qq </dev/null >&2 || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >&2 ||
        fail "apt could not install ${missing[*]}"
}

# Unpacks the kernel on which the distribution's package `linux-image-amd64` depends, without installing it.
unpack_kernel() {
    local package
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
    if [ -z "$package" ] && [ "$(id -u)" = 0 ]; then
        apt-get update -qq </dev/null >&2 || true
        package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
    fi
    # Without that package, uses any kernel that was unpacked before.
    if [ -z "$package" ]; then
        version=$(ls "$cache/kernel/lib/modules" 2>/dev/null | sort -V | tail -1)
        [ -n "$version" ] || fail "apt has no package linux-image-amd64; run apt-get update"
        return 0
    fi
    version=${package#linux-image-}
    [ ! -e "$cache/kernel/boot/vmlinuz-$version" ] || return 0
    local folder="$cache/kernel.$$"
    rm -rf "$folder"
    mkdir -p "$folder"
    (cd "$folder" && apt-get download -qq "$package" </dev/null >&2) || fail "apt could not fetch $package"
    dpkg -x "$folder"/*.deb "$folder" || fail "dpkg could not unpack $package"
    rm -f "$folder"/*.deb
    depmod -b "$folder" "$version" || fail "depmod failed for kernel $version"
    rm -rf "$cache/kernel"
    mv "$folder" "$cache/kernel"
}

# with_libraries FOLDER PROGRAM...: copies programs to /bin of the folder, and their libraries to the same paths in it.
with_libraries() {
    local folder=$1 program library
    shift
    mkdir -p "$folder/bin"
    for program in "$@"; do
        cp -L "$program" "$folder/bin/"
        # A static program has no libraries.
        ldd "$program" 2>/dev/null | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p; s/^\t\(\/[^ ]*\) (.*/\1/p' || true
    done | sort -u | while read -r library; do
        mkdir -p "$folder$(dirname "$library")"
        cp -L "$library" "$folder$library"
    done
}

pack() {
    (cd "$1" && find . -print0 | sort -z | cpio --null --create --format=newc --owner=0:0 --quiet)
}

# Builds the part of the image that is the same for all programs.
make_image() {
    local key root programs=() program module line
    key=$(cat "$0" <(echo "$version") | sha256sum | cut -c1-16)
    image="$cache/image-$key.cpio.gz"
    [ ! -e "$image" ] || return 0
    root="$cache/root.$$"
    rm -rf "$root"
    mkdir -p "$root"/{bin,dev,etc,proc,sys,tmp,run,modules,usr/lib,root}
    ln -s usr/lib "$root/lib"
    ln -s bin "$root/sbin"
    for program in "${PROGRAMS[@]}"; do
        programs+=("$(PATH="$PATH:/usr/sbin:/sbin" command -v "$program")") || fail "$program is missing"
    done
    # Programs name the loader as /lib64/..., which is a link on Debian.
    mkdir -p "$root/lib64"
    with_libraries "$root" "${programs[@]}"
    local providers=/usr/lib/$(uname -m)-linux-gnu/libibverbs
    mkdir -p "$root$providers" "$root/etc/libibverbs.d"
    cp -L "$providers"/librxe* "$root$providers/"
    cp /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/"
    local number=100
    for module in "${MODULES[@]}"; do
        modprobe -d "$cache/kernel" -S "$version" --show-depends "$module"
    done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' >"$root/modules/list" || fail "modprobe found not all of: ${MODULES[*]}"
    while read -r line; do
        cp "$line" "$root/modules/$number.ko"
        number=$((number + 1))
    done <"$root/modules/list"
    cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mkdir -p /bin
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin HOME=/root TMPDIR=/tmp TERM=dumb NO_COLOR=1
# Busybox has its own smaller `ip`, which its shell would prefer.
ip() { /bin/ip "$@"; }
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
ln -s /proc/self/fd /dev/fd
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
# The program's output is written to the second serial line, its status to the third. The first is the kernel's.
stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo
end() {
    echo "$1" >/dev/ttyS2
    sync
    poweroff -f
}
exec >/dev/ttyS1 2>&1 </dev/null
for module in /modules/*.ko; do insmod $module 2>/tmp/insmod || { cat /tmp/insmod; grep -q exists /tmp/insmod || end 120; }; done
hostname "$(sed -n 's/.*gin.host=\([^ ]*\).*/\1/p' /proc/cmdline)"
ip link set lo up
# The module itself creates dummy0.
ip addr add 10.7.0.1/24 dev dummy0
ip link set dummy0 mtu 4500 up
# Both ends of the wire are in this machine, and packets must travel nevertheless. So the rules for outgoing packets
# find the wire before they find that the address is local, and the rules for incoming packets do not.
ip link add v1 type veth peer name v2
ip addr add 10.7.1.1/32 dev v1
ip addr add 10.7.2.1/32 dev v2
ip link set v1 up
ip link set v2 up
ip neigh add 10.7.2.1 lladdr "$(cat /sys/class/net/v2/address)" dev v1 nud permanent
ip neigh add 10.7.1.1 lladdr "$(cat /sys/class/net/v1/address)" dev v2 nud permanent
for device in all v1 v2; do
    echo 1 >/proc/sys/net/ipv4/conf/$device/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$device/rp_filter
done
ip rule add pref 10 iif v1 lookup local
ip rule add pref 11 iif v2 lookup local
ip rule add pref 20 to 10.7.1.1 oif v2 lookup 100
ip rule add pref 21 to 10.7.2.1 oif v1 lookup 100
ip route add 10.7.1.1 dev v2 src 10.7.2.1 table 100
ip route add 10.7.2.1 dev v1 src 10.7.1.1 table 100
ip rule add pref 30 lookup local
ip rule del pref 0
rdma link add rxe0 type rxe netdev dummy0 || end 120
rdma link add rxe1 type rxe netdev v1 || end 120
rdma link add rxe2 type rxe netdev v2 || end 120
if grep -q gin.wire /proc/cmdline; then
    # The driver may find its device some time later.
    for _ in $(seq 100); do [ -e /sys/class/net/eth0 ] && break; sleep 0.1; done
    ip addr add "10.8.0.$(hostname | tr -cd 0-9)/24" dev eth0
    ip link set eth0 up
    rdma link add rxe3 type rxe netdev eth0 || end 120
fi
[ -x /run/setup ] && . /run/setup
# pingpong NAME SERVER-DEVICE CLIENT-DEVICE: 500 round trips of 4 KiB
pingpong() {
    ibv_rc_pingpong -d $2 -g 1 -s 4096 -n 500 >/tmp/server 2>&1 &
    sleep 1
    ibv_rc_pingpong -d $3 -g 1 -s 4096 -n 500 127.0.0.1 >/tmp/client 2>&1
    status=$?
    echo "facts: pingpong $1: status $status, $(tail -1 /tmp/client)"
    [ $status = 0 ] || { cat /tmp/server /tmp/client; end 120; }
}
if grep -q gin.facts /proc/cmdline; then
    echo "facts: Linux $(uname -r), $(nproc) CPUs, up for $(cut -d. -f1 /proc/uptime) s"
    for device in $(ls /sys/class/infiniband); do
        ibv_devinfo -v -d $device | awk -v device=$device '
            /state:|active_mtu:|link_layer:/ { facts = facts ", " $1 " " $2 }
            /GID\[ *1\]/ { sub(/.*GID\[ *1\]:[ \t]*/, ""); facts = facts ", gid 1: " $0 }
            END { print "facts: " device facts }'
    done
    pingpong loopback rxe0 rxe0
    pingpong wire rxe1 rxe2
fi
status=0
grep -q gin.input /proc/cmdline && exec </dev/ttyS1
[ -x /run/program ] && { /run/program; status=$?; }
end $status
INIT
    chmod +x "$root/init"
    pack "$root" | gzip -1 >"$image.$$"
    # The second archive must begin at a multiple of 4 bytes.
    truncate -s %4 "$image.$$"
    rm -rf "$root" "$cache"/image-*.cpio.gz
    mv "$image.$$" "$image"
}

quoted() { printf '%q ' "$@"; }

mkdir -p "$cache"
exec 8>"$cache/.lock"
flock 8
install_packages
unpack_kernel
make_image
exec 8>&-
[ -z "$prepare" ] || { echo "$image"; exit 0; }

# Removes the folders of killed runs.
find "$cache" -maxdepth 1 -name 'run.*' -mmin +240 -exec rm -rf {} +
run=$(mktemp -d "$cache/run.XXXXXX")
root="$run/root"
mkdir -p "$root/run"
cleaned() {
    if [ -n "${keep:-}" ]; then
        rm -rf "$root" "$run/initrd"
        printf 'soft-roce: the messages of the kernel are in %s/console.log\n' "$run" >&2
    else
        rm -rf "$run"
    fi
}
trap cleaned EXIT
if [ $# -gt 0 ]; then
    program=$(command -v "$1") || fail "program $1 is missing"
    shift
    name=$(basename "$program")
    with_libraries "$root" "$program"
    # Debug information would only take memory. A panic names its position without it.
    strip --strip-debug "$root/bin/$name" 2>/dev/null || true
    {
        echo '#!/bin/sh'
        for variable in ${environment[@]+"${environment[@]}"}; do echo "export $(quoted "$variable")"; done
        echo "exec /bin/$name $(quoted "$@")"
    } | sed "s/ ''\$//" >"$root/run/program"
    chmod +x "$root/run/program"
fi
for program in ${more[@]+"${more[@]}"}; do
    with_libraries "$root" "$program"
    strip --strip-debug "$root/bin/$(basename "$program")" 2>/dev/null || true
done
if [ -n "$setup" ]; then
    printf '%s' "$setup" >"$root/run/setup"
    chmod +x "$root/run/setup"
fi
for file in ${files[@]+"${files[@]}"}; do
    mkdir -p "$root$(dirname "$file")"
    # Libraries of a program may have made the folder.
    cp -rLT "$file" "$root$file"
done
# The second archive adds files to the first.
{ cat "$image"; pack "$root"; } >"$run/initrd"
append="console=ttyS0 quiet panic=1 mitigations=off gin.host=gin$host${facts:+ gin.facts}${input:+ gin.input}"
network=(-nic none)
if [ -n "$wire" ]; then
    side=on
    [ "$host" = 1 ] || side=off
    append+=" gin.wire"
    network=(-netdev "stream,id=wire,server=$side,addr.type=unix,addr.path=$wire"
        -device "virtio-net-pci,netdev=wire,romfile=,mac=52:54:00:10:08:0$host")
fi
[ -n "$input" ] || exec </dev/null
# Not with KVM: on some hosts that are virtual machines themselves the guest hangs at its first instruction. The machine
# ends with this script, in whatever way the script ends.
start=$SECONDS over=0
setpriv --pdeathsig TERM timeout --foreground -k 5 "$seconds" \
    setpriv --pdeathsig KILL qemu-system-x86_64 -accel tcg,thread=multi -cpu max -m "$memory" -smp 2 \
    -display none -monitor none -no-reboot "${network[@]}" \
    -kernel "$cache/kernel/boot/vmlinuz-$version" -initrd "$run/initrd" -append "$append" \
    -serial "file:$run/console.log" -serial stdio -serial "file:$run/status" || over=$?
status=$(tr -cd '0-9' <"$run/status" 2>/dev/null || true)
printf 'soft-roce: status %s after %d s\n' "${status:-unknown}" $((SECONDS - start)) >&2
if [ -n "$status" ]; then
    [ "$status" != 120 ] || keep=1
    exit "$status"
fi
keep=1
# 137: timeout had to kill the machine.
case $over in 124 | 137) exit 124 ;; *) exit 120 ;; esac
