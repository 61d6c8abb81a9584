//! Folders of files with right answers.

use std::fs;
use std::path::Path;

use super::cases::Fault;

/// Checks each `.safetensors` file of a folder by its name and bytes, in the order of the names. What is wrong comes back, a
/// folder that cannot be read included.
pub(crate) fn check_files(folder: &Path, mut check: impl FnMut(&str, &[u8]) -> Result<(), Fault>) -> Vec<Fault> {
    let mut files: Vec<_> = match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| entry.unwrap().path()).collect(),
        Err(e) => return vec![format!("{}: {e}", folder.display())],
    };
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    let fault = |file: &std::path::PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let outcome = fs::read(file).map_err(|e| e.to_string()).and_then(|bytes| check(&name, &bytes));
        outcome.err().map(|fault| format!("{name}: {fault}"))
    };
    files.iter().filter_map(fault).collect()
}
