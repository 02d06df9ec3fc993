pub fn open() -> crate::error::Result<super::shards::Checkpoint> {
    todo!()
}
