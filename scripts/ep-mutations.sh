#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Weakens barriers, buffers and tickets of expert parallelism, one after the other, in a copy of the sources, and
# requires that a test fails. Each barrier of a block or a warp in the kernels is left out once; a list below has the
# rest. The models of gin-device do the same with fences. Takes about half an hour. An argument chooses mutations by a
# part of their name.

set -uo pipefail
cd "$(dirname "$0")/.."
copy="${CARGO_TARGET_DIR:-$PWD/target}/ep-mutations"
kernels=gin-ep/kernels/src
wanted="${1:-}"
bad=0

mkdir -p "$copy"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory="$copy" --touch

# passes [SUITE:]TEST: runs a test of gin-ep in the copy. The status is 2 if it does not compile.
passes() {
    local suite=oracle
    [[ $1 == *:* ]] && suite=${1%%:*}
    local command=(cargo test --quiet -p gin-ep --no-default-features --test "$suite")
    (cd "$copy" && CARGO_TARGET_DIR="$copy/target" "${command[@]}" --no-run >"$copy/log" 2>&1) || return 2
    (cd "$copy" && CARGO_TARGET_DIR="$copy/target" timeout 300 "${command[@]}" "${1#*:}" -- --exact >"$copy/log" 2>&1)
    case $? in
        0) return 0 ;;
        124) return 3 ;;
        *) return 1 ;;
    esac
}

# judge NAME TEST...: requires that one of the tests fails in the copy. A mutation with an argument below passes all.
judge() {
    local name=$1 status=0 test
    shift
    for test in "$@"; do
        passes "$test"
        status=$?
        [ $status = 0 ] || break
    done
    if [ $status = 2 ]; then
        echo "$name: does not compile:"
        grep -m 3 -A 5 '^error' "$copy/log"
        bad=1
    elif [ $status != 0 ]; then
        # On a busy machine the test may only be slow.
        echo "$name: caught by $test$([ $status = 1 ] || echo ", which did not end within 300 s")"
        if [ -n "${argued[$name]:-}" ]; then
            echo "ep-mutations: $name: the argument is out of date" >&2
            bad=1
        fi
    elif [ -n "${argued[$name]:-}" ]; then
        echo "$name: not caught, because ${argued[$name]}"
    else
        echo "$name: NOT caught by $*"
        bad=1
    fi
}

# mutation NAME FILE TEXT REPLACEMENT TEST: replaces the first such text in the file.
mutation() {
    local name=$1 file=$2 from=$3 to=$4 text
    [[ $name == *"$wanted"* ]] || return 0
    text=$(<"$file")
    if [[ $text != *"$from"* ]]; then
        echo "ep-mutations: $name: $file does not have: $from" >&2
        bad=1
        return 0
    fi
    printf '%s\n' "${text/"$from"/"$to"}" >"$copy/$file"
    judge "$name" "$5"
    # With a new time, so that cargo compiles it.
    cp "$file" "$copy/$file"
}

# barriers: prints FILE, LINE and NAME of each barrier in the kernels: its function, and its number there.
barriers() {
    awk '
        FNR == 1 { split("", seen) }
        /^ *\/\// { next }
        match($0, /fn [a-z_0-9]+/) { name = substr($0, RSTART + 3, RLENGTH - 3) }
        match($0, /(Block|Warp|(self\.)?group)\.sync(_or)?\(/) {
            file = FILENAME
            sub(/.*kernels\/src\//, "", file)
            print FILENAME, FNR, file " " name " " ++seen[name]
        }
    ' "$kernels"/*.rs "$kernels"/matmul/*.rs "$kernels"/matmul/warpgroups/*.rs
}

# guard: guards all barriers in the copy, so that one build has each mutation: the barrier with the number in the
# variable is left out. Of a vote each thread then has its own.
guard() {
    local file line name number=0
    while read -r file line name; do
        number=$((number + 1))
        sed -i -E "${line}s/(Block|Warp|(self\.)?group)\.sync\(\);/if crate::has_barrier($number) { \1.sync(); }/
            ${line}s/(Block|group)\.sync_or\(/crate::vote($number, \1, /" "$copy/$file"
    done < <(barriers)
    cat >>"$copy/$kernels/lib.rs" <<'END'

pub(crate) fn has_barrier(number: u32) -> bool {
    static WITHOUT: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let without = || std::env::var("GIN_EP_WITHOUT").map_or(0, |number| number.parse().expect("a number"));
    *WITHOUT.get_or_init(without) != number
}

pub(crate) fn vote(number: u32, group: impl gin_device::prelude::Coop, value: bool) -> bool {
    if has_barrier(number) { group.sync_or(value) } else { value }
}
END
}

# Barriers without which no test fails, and why.
declare -A argued=(
    ["no barrier: network.rs give_back 1"]="the vote of the next round meets all lanes, and what follows is of one lane"
    ["no barrier: dispatch.rs end_section 2"]="on a CPU a vote orders memory, too"
    ["no barrier: matmul/warpgroups.rs begin 1"]="on a CPU a wait for an mbarrier may begin before it is initialised"
    ["no barrier: expand.rs arrive 1"]="a block follows the decision only if an answer came between two of its looks"
    ["no barrier: expand.rs find_zones 3"]="the broadcast of the next chunk's number meets all threads"
    ["no barrier: reserve.rs reserve_within 1"]="each lane reads the numbers that it has written"
    ["no barrier: reserve.rs reserve_within 2"]="a block follows the decision only if an answer came between two of its looks"
    ["no barrier: routes.rs close 1"]="the threads meet in F::meet before a lane reads what another one has written"
    ["no barrier: matmul/gather.rs work 1"]="a product begins with a barrier, which a thread that waits for rows has not reached"
    ["no barrier: matmul/mod.rs usable 1"]="threads differ only if a fault comes between the looks of two"
    ["no barrier: matmul/mod.rs leave 1"]="the first thread alone takes tiles and parts, and the end of the kernel covers the rest"
    ["no barrier: matmul/overlapped.rs leave 1"]="the broadcast that finds no tile meets all threads after they have read the lists"
    ["no barrier: matmul/overlapped.rs list_one 1"]="lists are in no window, so the detector of races does not see them"
    ["no barrier: matmul/scatter.rs raise 1"]="the broadcast of the tile's number meets all threads after the stores"
)

races=oracle:progress::nothing_races
bits=oracle:shapes::free_running_pairs_give_the_bits_of_the_oracle
routing=oracle:shapes::all_routings_give_the_bits_of_the_oracle_with_all_numbers_of_ranks
rounds=oracle:shapes::tokens_counted_in_several_rounds_go_to_the_same_places
resident=oracle:progress::one_resident_block_of_many_is_enough
network=network:rows_reach_ranks_over_the_network_with_the_bits_of_the_oracle
networks=network:free_running_pairs_graphs_and_epochs_that_wrap_cross_a_network
network_graphs=network:graphs_replay_in_any_order_over_a_network
network_races=network:nothing_races_over_a_network
limits=shared:rows_without_places_are_left_out_and_reported_and_the_next_call_works
grants=shared:a_grant_covers_the_loads_of_a_rank_that_the_source_does_not_hear
late=shared:the_places_of_a_late_rank_are_kept_until_it_has_its_rows_back
shared_races=shared:nothing_races
late_tiles=matmul:tiles_of_own_rows_are_multiplied_while_a_rank_is_late
one_block=matmul:one_resident_block_of_many_is_enough
one_multiplies=matmul:one_resident_block_of_many_multiplies_all_rows_as_they_arrive
layouts=oracle:layouts::all_layouts_have_the_rows_of_the_oracle_in_its_order
rows_of_ids=network:rows_for_each_id_and_all_elements_and_layouts_cross_a_network
mixed=oracle:reports::ranks_that_expect_metadata_and_rows_do_not_take_each_other_for_present
products=matmul:products_of_all_shapes_have_the_bits_of_the_oracle
products_races=matmul:nothing_races
silent_products=matmul:a_silent_rank_is_left_out_of_products_of_rows_that_arrive_and_may_come_back
lost_products=matmul:a_rank_that_does_not_come_ends_the_others_wait_with_a_fault

for test in $races $bits $routing $rounds $resident $network $networks $network_graphs $network_races $limits $grants $late $shared_races \
    $late_tiles $one_block $one_multiplies $layouts $mixed $rows_of_ids $products $products_races $silent_products $lost_products; do
    passes "$test" || { echo "ep-mutations: $test fails without a mutation; see $copy/log" >&2; exit 1; }
done

guard
export GIN_EP_WITHOUT=0
while read -r -u 3 _ _ name; do
    GIN_EP_WITHOUT=$((GIN_EP_WITHOUT + 1))
    [[ "no barrier: $name" == *"$wanted"* ]] || continue
    case $name in
        reserve.rs*) tests=($shared_races $grants $limits) ;;
        expand.rs*) tests=($races $layouts $resident) ;;
        layout.rs* | permute.rs* | expert_major.rs*) tests=($races $layouts $products_races) ;;
        network.rs*) tests=($network_races $rows_of_ids $networks) ;;
        matmul/*) tests=($products_races $products $one_multiplies $silent_products $lost_products) ;;
        *) tests=($races $rounds $routing $resident $shared_races) ;;
    esac
    judge "no barrier: $name" "${tests[@]}"
done 3< <(barriers)
unset GIN_EP_WITHOUT
cp "$kernels"/*.rs "$copy/$kernels"
cp -r "$kernels"/matmul/. "$copy/$kernels/matmul"

mutation "groups that are counted again" $kernels/routes.rs "self.passed = end;" "" $rounds
mutation "the rest of a round not counted" $kernels/routes.rs "self.pass_spans(self.spans());" "" $rounds
mutation "blocks of a small grid not counted" $kernels/protocol.rs "blocks == 1 || {" "blocks < 9 || {" $races
mutation "one set of words of a launch" $kernels/protocol.rs "epoch & 1" "epoch & 0" $bits
mutation "rows of a released dispatch overwritten without a word of other ranks" $kernels/protocol.rs \
    "last as u32 == last_use(buffer, false) as u32" "last as u32 == u32::MAX" $races
mutation "rows given up announced by the fifth block" $kernels/dispatch.rs "Warp.any(started == 0)" \
    "Warp.any(started == 4)" $resident
mutation "rows given up, and remote ranks not told" $kernels/dispatch.rs \
    "R::give_nothing_back(arena, slot, before, masked);" "" $network_graphs
mutation "the flag of the other buffer" $kernels/dispatch.rs "arena.word(F::flag(slot, source))" \
    "arena.word(F::flag(&slot.in_buffer(slot.buffer ^ 1), source))" $bits
mutation "a flag of any epoch" $kernels/protocol.rs "wrapping_sub(epoch as u32) < 1 << 31" \
    "wrapping_sub(epoch as u32) < u32::MAX" $bits
mutation "rows in place announced by the fifth block" $kernels/combine.rs "before == 0" "before == 4" $resident
mutation "a stored row added twice in place" $kernels/combine.rs "let is_first = is_one_of_several ||" \
    "let is_first = true ||" $routing
mutation "places of another rank" $kernels/dispatch.rs "owner.wrapping_sub(first) % WARP_SIZE" "first % WARP_SIZE" \
    $routing
mutation "no words cleared for the next combine" $kernels/dispatch.rs \
    "Launch::<Global>::new(arena.word(slot.word(COMBINE))).clear();" "" $bits
mutation "a weak signal behind rows and their metadata" $kernels/network.rs ".add(by))" ".add(by).weak())" $network
mutation "one buffer of staged rows" $kernels/network.rs "self.network.rows.at(buffer, remote)" \
    "self.network.rows.at(0, remote)" $network_races
mutation "a signal raised by the flag itself" $kernels/network.rs "value.wrapping_sub(raised.load_relaxed_gpu())" \
    "value" $network
mutation "returned rows of remote ranks by token" $kernels/combine.rs \
    "if arena.route.is_remote(owner) { self.place } else { self.token }" "self.token" $network
mutation "signals that begin with another epoch" $kernels/network.rs "sum.wrapping_add(self.route.network.base)" "sum" \
    $networks
mutation "rows past the end of a shared region" $kernels/dispatch.rs "routes.place(token, mine, sizes.max_rows)" \
    "routes.place(token, mine, u32::MAX)" $limits
mutation "terms of rows that were left out" $kernels/combine.rs "is_first && is_sent" "is_first" $limits
mutation "a shared region without the number of the first row" $kernels/routes.rs \
    "before.wrapping_sub(offset_at(arena, slot, rank))" "before" $rounds
mutation "a dispatch without the number of the first row that it was granted" $kernels/routes.rs \
    "if rank < self.ranks { offset_at(arena, slot, rank) }" \
    "if rank < self.ranks { offset_at(arena, slot, rank).min(0) }" $limits
mutation "places of a silent rank reserved for others" $kernels/reserve.rs \
    "if protocol::is_over::<Global>(arena.word(slot.announced(rank)), last >> 32) {" "if true {" $late
mutation "places reserved before all ranks have announced" $kernels/reserve.rs "(epoch, masked), slot.deadline" \
    "(epoch.wrapping_sub(1), masked), slot.deadline" $shared_races
mutation "a tile of own rows left out" $kernels/matmul/overlapped.rs "(at, index) if expert == at => index," \
    "(at, index) if expert == at => index + 1," $late_tiles
mutation "sources heard by the fifth block" $kernels/matmul/tile_scheduler.rs "self.hearers.add_relaxed_gpu(1) == 0" \
    "self.hearers.add_relaxed_gpu(1) == 4" $one_multiplies
mutation "tiles of a reduce-scatter added before they are there" $kernels/matmul/scatter.rs \
    "|| board.arrives(source, row_tile, column_tile)" "" $products_races
mutation "a tile of a reduce-scatter stored before a warp has waited for its terms" $kernels/matmul/warpgroups.rs \
    "if W::PREPARES {" "if W::FINDER == Finder::Warp1 {" $products_races
mutation "an own tile of a reduce-scatter before those with its number" $kernels/matmul/scatter.rs \
    "(index.saturating_sub(lead) / ranks)" "((index + ranks - 1).saturating_sub(lead) / ranks)" $one_block
mutation "a section announced before its end" $kernels/dispatch.rs \
    "end_section(arena, slot, section, until, masked)" "end_section(arena, slot, section, until + 1, masked)" $races
mutation "rows awaited one token too early" $kernels/permute.rs "epoch, token + 1)" "epoch, token)" $races
mutation "metadata behind the flag of rows" $kernels/format.rs "slot.metadata_flag(source)" \
    "slot.sent_flag(source)" $mixed
mutation "counts of the part itself taken as earlier" $kernels/expert_major.rs "threads < self.number" "threads <= self.number" $layouts
exit $bad
