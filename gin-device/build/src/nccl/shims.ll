; SPDX-License-Identifier: MIT OR Apache-2.0
;
; Functions with scalar arguments over the C functions of NCCL's device library, libnccl_device.bc.
;
; rustc and clang pass structures to device functions in different ways: rustc as an array of integers, clang as a
; pointer with `byval`. A call with the wrong form is undefined. So the structures are made here, in the form of clang.
;
; Each function acts for the calling thread alone: the caller has synchronised its group of threads. `comm` points to an
; ncclDevComm, `mask` has bit `1 << type` for each type of back end that may serve the communicator. Ranks are ranks of
; the world team. A signal is raised by addition, never by `ncclGinSignalInc`, because NCCL forbids mixing the two.

target triple = "nvptx64-nvidia-cuda"

%struct.ncclTeam = type { i32, i32, i32 }
%struct.ncclGinBarrierHandle = type { i32, i32 }
%"struct.ncclCoopAny::Storage" = type { [16 x i8] }
%struct.ncclCoopAny = type { %"struct.ncclCoopAny::Storage", ptr }
%struct.ncclGin_C = type <{ ptr, i32, i32, i8, [7 x i8], ptr, ptr, i32, [4 x i8] }>

declare void @ncclGin_C_initWithResourceSharingMode(ptr, i32, ptr, i32, i8 zeroext)
declare void @ncclCoopAnyInitThread(ptr)
declare %struct.ncclTeam @ncclTeamWorld(ptr)
declare %struct.ncclGinBarrierHandle @ncclDevComm_WorldGinBarrier(ptr)
declare void @ncclGinPut_v2(ptr, ptr byval(%struct.ncclTeam), i32, ptr, i64, ptr, i64, i64, i1 zeroext, i32, i32, i64, i1 zeroext, i32, ptr byval(%struct.ncclCoopAny), i1 zeroext, ptr, i32, i32, i32) #1
declare void @ncclGinPutValue_v2(ptr, ptr byval(%struct.ncclTeam), i32, ptr, i64, i64, i64, i1 zeroext, i32, i32, i64, ptr byval(%struct.ncclCoopAny), i1 zeroext, ptr, i32, i32, i32) #1
declare void @ncclGinSignal_v2(ptr, ptr byval(%struct.ncclTeam), i32, i1 zeroext, i32, i32, i64, ptr byval(%struct.ncclCoopAny), i1 zeroext, ptr, i32, i32, i32) #1
; NCCL 2.30.7 exports it by its C++ name: (ncclGin_C*, ncclTeam, int peer, window and offset there, window and offset
; here, size_t bytes, ncclCoopAny, bool, ncclGinDescriptorSmem*, unsigned options).
declare void @_Z10ncclGinGetP9ncclGin_C8ncclTeamiP17ncclWindow_vidmemmS3_mm11ncclCoopAnybP21ncclGinDescriptorSmemj(ptr, ptr byval(%struct.ncclTeam), i32, ptr, i64, ptr, i64, i64, ptr byval(%struct.ncclCoopAny), i1 zeroext, ptr, i32) #1
declare void @ncclGinFlush(ptr, ptr byval(%struct.ncclCoopAny), i32) #1
declare i64 @ncclGinReadSignal(ptr, i32, i32, i32) #1
declare i64 @ncclGinReadCounter(ptr, i32, i32, i32) #1
declare void @ncclGinResetSignal(ptr, i32) #1
declare void @ncclGinResetCounter(ptr, i32) #1
declare ptr @ncclGinGetSignalShadowPtr(ptr, i32)

define void @gin_nccl_put(ptr %comm, i32 %context, i32 %mask, i32 %sharing, i32 %peer, ptr %to, i64 %to_offset, ptr %from, i64 %from_offset, i64 %bytes, i1 zeroext %has_signal, i32 %signal, i64 %amount, i1 zeroext %has_counter, i32 %counter, i32 %given, i32 %required, i32 %options) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  %coop = alloca %struct.ncclCoopAny, align 8
  %team = alloca %struct.ncclTeam, align 4
  %mode = trunc i32 %sharing to i8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext %mode)
  call void @ncclCoopAnyInitThread(ptr %coop)
  %world = call %struct.ncclTeam @ncclTeamWorld(ptr %comm)
  store %struct.ncclTeam %world, ptr %team, align 4
  call void @ncclGinPut_v2(ptr %gin, ptr byval(%struct.ncclTeam) %team, i32 %peer, ptr %to, i64 %to_offset, ptr %from, i64 %from_offset, i64 %bytes, i1 zeroext %has_signal, i32 %signal, i32 1, i64 %amount, i1 zeroext %has_counter, i32 %counter, ptr byval(%struct.ncclCoopAny) %coop, i1 zeroext false, ptr null, i32 %given, i32 %required, i32 %options) #1
  ret void
}

define void @gin_nccl_get(ptr %comm, i32 %context, i32 %mask, i32 %sharing, i32 %peer, ptr %there, i64 %there_offset, ptr %here, i64 %here_offset, i64 %bytes, i32 %options) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  %coop = alloca %struct.ncclCoopAny, align 8
  %team = alloca %struct.ncclTeam, align 4
  %mode = trunc i32 %sharing to i8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext %mode)
  call void @ncclCoopAnyInitThread(ptr %coop)
  %world = call %struct.ncclTeam @ncclTeamWorld(ptr %comm)
  store %struct.ncclTeam %world, ptr %team, align 4
  call void @_Z10ncclGinGetP9ncclGin_C8ncclTeamiP17ncclWindow_vidmemmS3_mm11ncclCoopAnybP21ncclGinDescriptorSmemj(ptr %gin, ptr byval(%struct.ncclTeam) %team, i32 %peer, ptr %there, i64 %there_offset, ptr %here, i64 %here_offset, i64 %bytes, ptr byval(%struct.ncclCoopAny) %coop, i1 zeroext false, ptr null, i32 %options) #1
  ret void
}

define void @gin_nccl_put_value(ptr %comm, i32 %context, i32 %mask, i32 %sharing, i32 %peer, ptr %to, i64 %to_offset, i64 %value, i64 %bytes, i1 zeroext %has_signal, i32 %signal, i64 %amount, i32 %given, i32 %required, i32 %options) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  %coop = alloca %struct.ncclCoopAny, align 8
  %team = alloca %struct.ncclTeam, align 4
  %mode = trunc i32 %sharing to i8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext %mode)
  call void @ncclCoopAnyInitThread(ptr %coop)
  %world = call %struct.ncclTeam @ncclTeamWorld(ptr %comm)
  store %struct.ncclTeam %world, ptr %team, align 4
  call void @ncclGinPutValue_v2(ptr %gin, ptr byval(%struct.ncclTeam) %team, i32 %peer, ptr %to, i64 %to_offset, i64 %value, i64 %bytes, i1 zeroext %has_signal, i32 %signal, i32 1, i64 %amount, ptr byval(%struct.ncclCoopAny) %coop, i1 zeroext false, ptr null, i32 %given, i32 %required, i32 %options) #1
  ret void
}

define void @gin_nccl_signal(ptr %comm, i32 %context, i32 %mask, i32 %sharing, i32 %peer, i32 %signal, i64 %amount, i32 %given, i32 %required, i32 %options) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  %coop = alloca %struct.ncclCoopAny, align 8
  %team = alloca %struct.ncclTeam, align 4
  %mode = trunc i32 %sharing to i8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext %mode)
  call void @ncclCoopAnyInitThread(ptr %coop)
  %world = call %struct.ncclTeam @ncclTeamWorld(ptr %comm)
  store %struct.ncclTeam %world, ptr %team, align 4
  call void @ncclGinSignal_v2(ptr %gin, ptr byval(%struct.ncclTeam) %team, i32 %peer, i1 zeroext true, i32 %signal, i32 1, i64 %amount, ptr byval(%struct.ncclCoopAny) %coop, i1 zeroext false, ptr null, i32 %given, i32 %required, i32 %options) #1
  ret void
}

define void @gin_nccl_flush(ptr %comm, i32 %context, i32 %mask, i32 %order) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  %coop = alloca %struct.ncclCoopAny, align 8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext 0)
  call void @ncclCoopAnyInitThread(ptr %coop)
  call void @ncclGinFlush(ptr %gin, ptr byval(%struct.ncclCoopAny) %coop, i32 %order) #1
  ret void
}

define i64 @gin_nccl_read_signal(ptr %comm, i32 %context, i32 %mask, i32 %signal, i32 %bits, i32 %order) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext 0)
  %value = call i64 @ncclGinReadSignal(ptr %gin, i32 %signal, i32 %bits, i32 %order) #1
  ret i64 %value
}

define i64 @gin_nccl_read_counter(ptr %comm, i32 %context, i32 %mask, i32 %counter, i32 %bits, i32 %order) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext 0)
  %value = call i64 @ncclGinReadCounter(ptr %gin, i32 %counter, i32 %bits, i32 %order) #1
  ret i64 %value
}

define void @gin_nccl_reset_signal(ptr %comm, i32 %context, i32 %mask, i32 %signal) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext 0)
  call void @ncclGinResetSignal(ptr %gin, i32 %signal) #1
  ret void
}

define void @gin_nccl_reset_counter(ptr %comm, i32 %context, i32 %mask, i32 %counter) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext 0)
  call void @ncclGinResetCounter(ptr %gin, i32 %counter) #1
  ret void
}

define ptr @gin_nccl_signal_shadow(ptr %comm, i32 %context, i32 %mask, i32 %signal) #0 {
  %gin = alloca %struct.ncclGin_C, align 8
  call void @ncclGin_C_initWithResourceSharingMode(ptr %gin, i32 %mask, ptr %comm, i32 %context, i8 zeroext 0)
  %shadow = call ptr @ncclGinGetSignalShadowPtr(ptr %gin, i32 %signal)
  ret ptr %shadow
}

; The first signal of the barriers of the world team.
define i32 @gin_nccl_world_barrier(ptr %comm) #0 {
  %handle = call %struct.ncclGinBarrierHandle @ncclDevComm_WorldGinBarrier(ptr %comm)
  %first = extractvalue %struct.ncclGinBarrierHandle %handle, 0
  ret i32 %first
}

attributes #0 = { alwaysinline convergent nounwind }
attributes #1 = { convergent nounwind }
