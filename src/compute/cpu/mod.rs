//! The CPU side: threads, instruction-set dispatch, one kernel family a file.
