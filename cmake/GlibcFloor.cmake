# A library linked on a new glibc asks for the newest version of each function, and will not load on an older glibc
# though nothing in it is new: glibc 2.34 moved libpthread, libdl and librt into libc under new versions, 2.29 and 2.27
# did so with exp, log and pow. Functions that were there all along are linked against tiny stand-ins that carry the first
# version; at run time the real glibc resolves them. x86_64 only: other architectures started at other versions.
set(_floor_pthread
  pthread_condattr_setpshared pthread_create pthread_detach pthread_getaffinity_np pthread_getspecific pthread_join
  pthread_key_create pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy
  pthread_mutexattr_init pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy
  pthread_rwlock_init pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock
  pthread_rwlock_tryrdlock pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock
  pthread_rwlockattr_destroy pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific
  pthread_spin_destroy pthread_spin_init pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init
  sem_post sem_timedwait sem_trywait sem_wait)
set(_floor_dl dlclose dlerror dlopen dlsym dlvsym)
set(_floor_dl_2.3.4 dlmopen)
set(_floor_rt shm_open shm_unlink)
# The linker takes one library of a name only, so this list holds every libm function that the sources may call.
set(_floor_m
  ceil cos erf erfc exp exp2 expm1 fabs floor fma fmax fmin fmod frexp hypot ldexp llrint llround log log10 log1p log2
  lrint lround nearbyint pow rint round sin sqrt tan tanh trunc
  ceilf cosf erff erfcf expf exp2f expm1f fabsf floorf fmaf fmaxf fminf fmodf frexpf hypotf ldexpf llrintf llroundf logf
  log10f log1pf log2f lrintf lroundf nearbyintf powf rintf roundf sinf sqrtf tanf tanhf truncf)

# One shared library of empty functions with the SONAME of the real one.
function(_glibc_stand_in name soversion)
  set(code "")
  set(map "")
  set(before "")
  foreach(version 2.2.5 2.3.4)
    set(list "_floor_${name}")
    if(NOT version STREQUAL "2.2.5")
      string(APPEND list "_${version}")
    endif()
    if(NOT ${list})
      continue()
    endif()
    string(APPEND map "GLIBC_${version} {\n  global:\n")
    foreach(f IN LISTS ${list})
      string(APPEND code "void ${f}(void) {}\n")
      string(APPEND map "    ${f};\n")
    endforeach()
    string(APPEND map "}${before};\n")
    set(before " GLIBC_${version}")
  endforeach()
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/glibc_floor")
  file(CONFIGURE OUTPUT "${folder}/${name}.cpp" CONTENT "extern \"C\" {\n${code}}\n" @ONLY)
  file(CONFIGURE OUTPUT "${folder}/${name}.map" CONTENT "${map}" @ONLY)
  add_library(glibc_floor_${name} SHARED "${folder}/${name}.cpp")
  set_target_properties(glibc_floor_${name} PROPERTIES
    OUTPUT_NAME ${name} NO_SONAME ON LIBRARY_OUTPUT_DIRECTORY "${folder}" CXX_VISIBILITY_PRESET default)
  target_compile_options(glibc_floor_${name} PRIVATE -ffreestanding -fno-builtin -w)
  target_link_options(glibc_floor_${name} PRIVATE
    -nostdlib "-Wl,-soname,lib${name}.so.${soversion}" "-Wl,--version-script=${folder}/${name}.map")
endfunction()

# libstdc++ goes in statically, where the compiler ships it: its symbol versions rise with the compiler's. It reads one
# glibc variable of 2.32, which gets a value of our own here ("there may be threads").
function(_static_libstdcxx target)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.a
    OUTPUT_VARIABLE archive OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT IS_ABSOLUTE "${archive}")
    message(STATUS "liblinattn.so: no static libstdc++ here, so it will need one as new as this compiler's")
    return()
  endif()
  set(file "${CMAKE_CURRENT_BINARY_DIR}/glibc_floor/single_threaded.cpp")
  file(CONFIGURE OUTPUT "${file}" CONTENT
    "extern \"C\" {\n__attribute__((visibility(\"hidden\"))) char __libc_single_threaded = 0;\n}\n" @ONLY)
  target_sources(${target} PRIVATE "${file}")
  target_link_options(${target} PRIVATE -static-libstdc++)
endfunction()

function(target_glibc_floor target)
  _glibc_stand_in(pthread 0)
  _glibc_stand_in(dl 2)
  _glibc_stand_in(rt 1)
  _glibc_stand_in(m 6)
  _static_libstdcxx(${target})
  # Before libc and libm in the link line. The linker would drop a stand-in that nothing but a static library needs.
  target_link_libraries(${target} PRIVATE "-Wl,--push-state,--no-as-needed"
    glibc_floor_pthread glibc_floor_dl glibc_floor_rt glibc_floor_m "-Wl,--pop-state")
endfunction()
