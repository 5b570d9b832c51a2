//! What holds for all C code of the component.

use std::fs;
use std::path::Path;

/// glibc's `fprintf` writes a line of more than 128 bytes to stderr in pieces (2.37 and later), and `mpirun` of Open MPI 5.0 may put other output
/// between these, so that neither line can be found any more.
#[test]
fn each_message_is_written_whole() {
    let shim = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim");
    let mut files = 0;
    for file in fs::read_dir(shim).unwrap() {
        let file = file.unwrap().path();
        let text = fs::read_to_string(&file).unwrap();
        for way in ["fprintf(", "fputs(", "perror(", " printf("] {
            assert!(!text.contains(way), "{way} in {}", file.display());
        }
        files += 1;
    }
    assert!(files > 0);
}
