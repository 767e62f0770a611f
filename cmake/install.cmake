# For C++ users: the headers, the library with a version, and what find_package(zcomm) reads.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# Before 1.0 a minor version may change the interface.
set_target_properties(zcomm_core PROPERTIES VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} EXPORT_NAME core)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/zcomm)
install(TARGETS zcomm_core EXPORT zcomm-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET zcomm_nccl)
  install(TARGETS zcomm_nccl LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/zcomm DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT zcomm-targets NAMESPACE zcomm:: DESTINATION ${package_dir})
configure_file(${CMAKE_CURRENT_LIST_DIR}/zcomm-config.cmake.in zcomm-config.cmake @ONLY)
write_basic_package_version_file(zcomm-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/zcomm-config.cmake ${PROJECT_BINARY_DIR}/zcomm-config-version.cmake
  DESTINATION ${package_dir})
